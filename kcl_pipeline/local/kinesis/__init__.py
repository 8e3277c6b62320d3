"""HTTP interface of the embedded Kinesis."""
