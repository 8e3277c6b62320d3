"""Delta tables as sinks, without Spark: log, commits, maintenance."""
