"""HTTP servers of the embedded AWS, and which requests they reject."""
