"""The assignment strategies of the Java KCL."""
