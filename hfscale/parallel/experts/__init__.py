"""Expert parallelism: complete experts on each rank, the exchange of tokens between them, routing and balance."""
