"""Clients that come to a finished run, and clients that leave it."""
