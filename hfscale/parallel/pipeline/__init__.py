"""Run and simulate pipeline parallelism: schedules as data, simulations of schedules, and recorded runs."""
