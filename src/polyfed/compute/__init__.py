"""The work of one client: the task, batches, local solvers and the paths that run them."""
