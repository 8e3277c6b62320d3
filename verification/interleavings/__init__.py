"""Search all interleavings of the commit protocol's I/O calls."""
