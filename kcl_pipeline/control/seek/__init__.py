"""Set the positions of an application by time or position."""
