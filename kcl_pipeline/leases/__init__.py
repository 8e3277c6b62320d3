"""The lease table: rows, conditional writes, renewal, discovery, two-phase checkpoint."""
