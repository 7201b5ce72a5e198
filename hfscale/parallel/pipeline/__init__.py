"""Pipeline parallelism: schedules as data, their simulation, their runs, and what these recorded."""
