"""Read many shards ahead of processing, within one limit of bytes."""
