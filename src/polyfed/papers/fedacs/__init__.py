"""FedACS, "Personalized Federated Learning with Attention-based Client Selection" (arXiv 2312.15148): what its
experiments share.
"""
