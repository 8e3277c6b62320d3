"""A seek back with a Delta table: each record of the range lands exactly once more."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa

from kcl_pipeline import DeltaSink, KinesisPipeline
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.control.seek import Seeking, seek_target
from kcl_pipeline.delta.sink import DeltaCommitter
from kcl_pipeline.testing import PipelineTest
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis


def only_data(records: pa.Table) -> pa.Table:
    return records.select(["shard_id", "data"])


def data(test):
    return Counter(row["data"] for row in test.rows())


def seek_to_the_beginning(test):
    clock = SystemClock()
    app = ApplicationControl(
        test.pipeline.settings, test._leases, test._metrics, test._coordinator, clock, "ann"
    )
    log = DeltaCommitter(test.pipeline.sink, test.pipeline.name)
    target = seek_target("TRIM_HORIZON", None, None, clock.wall())
    seeking = Seeking(app, InMemoryKinesis(test.kinesis), target, sink=log)
    return seeking.write("token", pause=True, wait_seconds=30)


def test_each_record_lands_once_more_also_after_crashes():
    pipeline = KinesisPipeline(
        name="orders",
        streams=["orders"],
        transform_arrow=only_data,
        sink=DeltaSink("unused"),
    )
    with PipelineTest(pipeline, shards=2) as test:
        first = [b"%d" % n for n in range(10)]
        test.put(*first)
        test.run()
        done = seek_to_the_beginning(test)
        assert (len(done.written), done.refused) == (2, ())
        test.run()
        assert data(test) == Counter(first * 2)
        test.put(b"landed")
        test.run_and_crash(after="commit")
        seek_to_the_beginning(test)
        test.run()
        assert data(test) == Counter([*first * 3, *[b"landed"] * 2])
        test.put(b"lost")
        test.run_and_crash(before="commit")
        seek_to_the_beginning(test)
        test.run()
        assert data(test) == Counter([*first * 4, *[b"landed"] * 3, b"lost"])
