"""Pass records to local Spark tasks as Arrow columns in memory, which the tasks read in place."""
