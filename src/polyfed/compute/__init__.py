"""What one client computes: the task, batches, local solvers and the paths that run them."""
