"""Private names of transformers, by subject. Read and run with transformers 5.17.0 and 5.23.0."""
