"""Hold what no plain training run needs, one package each: an extension, which nothing outside imports."""
