"""Privacy: secure sums, differential privacy with a ledger, and an audit that tries to break them."""
