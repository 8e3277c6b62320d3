"""One module per group of boundaries; each has a tuple `BOUNDARIES`."""
