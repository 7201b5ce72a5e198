"""Run pipeline parallelism, simulate its schedules, and record the times of a run."""
