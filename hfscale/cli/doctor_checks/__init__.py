"""Check this machine, and a recipe, for problems before a run starts."""
