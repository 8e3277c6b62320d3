"""Lead the application in a worker, or work without a leader."""
