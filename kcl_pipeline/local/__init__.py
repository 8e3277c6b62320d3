"""Embedded AWS: Kinesis, DynamoDB, S3, STS and CloudWatch over HTTP on 127.0.0.1."""

from kcl_pipeline.local.faults import Fault, FaultHook, FaultRule
from kcl_pipeline.local.server import EmbeddedAws

__all__ = ["EmbeddedAws", "Fault", "FaultHook", "FaultRule"]
