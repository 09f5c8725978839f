"""FedCET, "Communication Efficient Federated Learning with Linear Convergence on Heterogeneous Data": what its
experiments share.
"""
