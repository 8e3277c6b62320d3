"""The pipelines of the stop tests: a transform, a function as the sink and a table in S3.

While the file FLEET_LAKE/hang exists, the transform and the function do not return.
"""

import os
import time
from pathlib import Path

import pyarrow as pa

from kcl_pipeline import BatchIdentity, DeltaSink, ForeachArrowSink, KinesisPipeline

HANG = Path(os.environ["FLEET_LAKE"]) / "hang"
ENTERED = Path(os.environ["FLEET_LAKE"]) / "entered"
FAILOVER_MILLIS = 8_000
STOP_TIMEOUT_MILLIS = 2_000


def hang() -> None:
    while HANG.exists():
        ENTERED.touch()
        time.sleep(0.05)


def transform(records: pa.Table) -> pa.Table:
    hang()
    return records.select(["data"])


def function(rows: pa.Table, identity: BatchIdentity) -> None:
    del rows, identity
    hang()


def pipeline(**differs: object) -> KinesisPipeline:
    settings = {
        "lease": {"failover_time_millis": FAILOVER_MILLIS, "lease_discovery_interval_millis": 400},
        "assignment": {"lease_assignment_interval_millis": 1_000},
        "worker": {
            "worker_metrics_reporter_freq_in_millis": 1_000,
            "stop_timeout_millis": STOP_TIMEOUT_MILLIS,
        },
    }
    return KinesisPipeline(name="fleet", streams=["events"], settings_overrides=settings, **differs)


table = pipeline(transform_arrow=transform, sink=DeltaSink(os.environ["FLEET_LAKE"] + "/events"))
store = pipeline(transform_arrow=transform, sink=DeltaSink("s3://stopping/events"))
called = pipeline(sink=ForeachArrowSink(function))
