"""The three tables in DynamoDB."""
