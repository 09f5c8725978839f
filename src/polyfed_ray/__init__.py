"""An engine whose clients are actors of Ray, on this machine or on many."""
