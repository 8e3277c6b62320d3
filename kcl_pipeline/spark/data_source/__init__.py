"""Kinesis as a Spark data source: `format("kinesis")`."""
