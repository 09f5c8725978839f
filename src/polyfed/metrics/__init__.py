"""Metrics: what a model is judged by, sample by sample."""
