"""Run and simulate pipeline parallelism: schedules as data, their simulation, and their recorded runs."""
