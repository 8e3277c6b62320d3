"""Write, read and mark dead letters."""
