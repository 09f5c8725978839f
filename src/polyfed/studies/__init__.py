"""What is done with several runs, or with one that is over: comparisons, tuning, departures, newcomers, exports."""
