"""Plan and install context parallelism: a rank computes some tokens of every sequence; attention reads all tokens."""
