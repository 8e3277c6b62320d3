"""In-memory Kinesis and tables, and a virtual clock: what users test their transforms with."""
