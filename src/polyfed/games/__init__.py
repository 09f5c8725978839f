"""Who gains from whom: every coalition of the clients as a federation of its own, and what follows from the scores."""
