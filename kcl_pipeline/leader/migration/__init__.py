"""Follow an application from KCL 2.x, and move it to the single table."""
