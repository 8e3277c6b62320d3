"""The assets: two pipelines that read Kinesis, and a table that follows one of them."""
