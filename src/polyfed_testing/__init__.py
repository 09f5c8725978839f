"""The conformance table for anybody's method, and the files that a new one begins with."""
