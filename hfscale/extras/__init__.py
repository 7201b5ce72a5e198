"""What no plain training run needs, one package each: every one is an extension, and nothing outside imports it."""
