"""The HTTP interface of the embedded Kinesis."""
