"""Plan and install context parallelism: ranks hold parts of the same sequences; only attention reads the others'."""
