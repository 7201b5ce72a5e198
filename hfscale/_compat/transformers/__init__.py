"""Private names of transformers, by subject. Read and run with transformers 5.17 to 5.24."""
