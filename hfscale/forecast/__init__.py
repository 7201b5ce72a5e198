"""What a run will take before it is started: seconds and bytes of every stage, and which layout to choose."""
