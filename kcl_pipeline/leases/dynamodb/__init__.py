"""Implement the three tables in DynamoDB."""
