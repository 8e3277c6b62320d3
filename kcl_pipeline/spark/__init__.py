"""Arrow in, DataFrame out, sink commits."""
