"""Follow an application from KCL 2.x."""
