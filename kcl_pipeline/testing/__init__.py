"""In-memory Kinesis, tables and sink, and a virtual clock, to test transforms with."""
