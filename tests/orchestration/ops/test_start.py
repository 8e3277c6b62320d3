"""The part of a worker's start that comes before its Spark session."""

from __future__ import annotations

import threading

import pytest

from kcl_pipeline.aws import AwsClients, SessionOptions
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.local import EmbeddedAws, FaultRule
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.threads import StoppedWhileRetryingError


def test_a_stop_ends_the_wait_for_throttled_tables(tmp_path):
    pipeline = KinesisPipeline("orders", ["orders"], DeltaSink(str(tmp_path / "raw")))
    stop, events = threading.Event(), []

    def note(event):
        events.append(event)
        stop.set()

    with EmbeddedAws() as aws:
        options = SessionOptions(
            endpoint_url=aws.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )
        clients = AwsClients(pipeline.settings, options)
        clients.kinesis.create_stream(StreamName="orders", ShardCount=1)
        aws.fault_rules.replace(
            [FaultRule(service="dynamodb", operation="DescribeTable", kind="throttle", count=100)]
        )
        with pytest.raises(StoppedWhileRetryingError, match="look at the tables"):
            pipeline.build_worker("w-1", clients=clients, events=note, stop=stop)
    assert [type(event) for event in events] == [AwsTrouble]
