"""Implement the assignment strategies of the Java KCL."""
