"""Adapters on pretrained models, and the methods that train and merge their low-rank updates."""
