"""The ground floor: errors, settings, randomness, checkpoints."""
