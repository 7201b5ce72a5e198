"""Draw schedules of pipelines: in the terminal, as a plot, as a table of what each rank sends."""
