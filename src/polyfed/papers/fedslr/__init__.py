"""FedSLR, "Fusion of Global and Local Knowledge for Personalized Federated Learning": what its experiments share."""
