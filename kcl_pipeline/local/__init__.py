"""The embedded AWS: Kinesis and DynamoDB on 127.0.0.1."""
