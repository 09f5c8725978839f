"""The audit between sites: units, codes, sentinels, limits of detection, repeated patients, and the outcome.

Thresholds leave clean sites alone: tests/audit simulates how often they do not.
"""
