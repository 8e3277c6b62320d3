"""Report to the driver which range each task has read."""
