"""Search: workloads to tune, candidates to try, and the run that finds, checks and stores the best one."""
