"""An in-memory Kinesis Data Streams service."""
