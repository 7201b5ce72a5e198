"""What is asked of the models of cost: estimates, a search over layouts, dry runs, calibration, and their reports."""
