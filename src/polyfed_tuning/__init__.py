"""One numeric setting of a method by validation data."""
