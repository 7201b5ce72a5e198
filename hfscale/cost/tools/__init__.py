"""Tools that use the cost models: estimates, search for layouts, dry runs and reports."""
