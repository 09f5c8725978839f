"""PFLlib's public leaderboard: its Fashion-MNIST columns, with its protocol and with ours."""
