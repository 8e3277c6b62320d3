"""Commit of batches to the sink, and the checkpoints that follow."""
