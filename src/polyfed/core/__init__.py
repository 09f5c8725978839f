"""The contract of a method, and the loop that trains it: messages, rounds, schedule, ledger. No data, no files."""
