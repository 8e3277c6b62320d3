"""The Spark data source `format("kinesis")`."""
