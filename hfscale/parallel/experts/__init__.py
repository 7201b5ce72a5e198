"""Expert parallelism: each rank holds whole experts, and ranks exchange tokens; routing and load balancing."""
