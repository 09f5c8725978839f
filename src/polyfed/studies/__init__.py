"""Studies of several runs, or of one that is over: comparisons, tuning, departures, newcomers, exports."""
