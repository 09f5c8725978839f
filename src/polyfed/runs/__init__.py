"""A run: its settings, its parts, its training, its results and the folder that holds them."""
