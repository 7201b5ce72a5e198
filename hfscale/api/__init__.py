"""Build a model that trains: check arguments, plan, load, install parts; attach and merge adapters."""
