"""Where a worker's batches come from."""
