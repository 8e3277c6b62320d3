"""Run the user's Spark transform on Arrow batches and write its output."""
