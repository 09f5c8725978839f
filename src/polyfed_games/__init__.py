"""Coalitions, or who gains from whom: every one as a federation of its own, and what follows from the scores."""
