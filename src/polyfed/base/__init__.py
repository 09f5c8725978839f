"""What everything stands on: errors, settings, randomness, checkpoints."""
