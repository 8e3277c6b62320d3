"""How batches become part of the sink's table, and how far the lease rows follow."""
