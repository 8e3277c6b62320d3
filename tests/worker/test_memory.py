"""The memory budget of a whole worker under a slow transform: reading waits, nothing is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pyarrow as pa
import pytest

from kcl_pipeline import DeltaSink, KinesisPipeline
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.testing import PipelineTest, pipelines

MIB = 1024 * 1024
LIMIT = 64 * MIB
DEADLINE_SECONDS = 60
LARGE = b"L" * (10 * MIB - 100)


class Watched:
    """The budgets of the workers of a test."""

    def __init__(self) -> None:
        self.budgets: list[MemoryBudget] = []

    def of(self, settings: ConsumerSettings) -> MemoryBudget:
        self.budgets.append(MemoryBudget.of(settings))
        return self.budgets[-1]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    found = Watched()
    monkeypatch.setattr(pipelines, "MemoryBudget", found)
    return found


def test_the_limit_of_a_worker_is_half_a_gibibyte_or_more() -> None:
    def limit(prefetch: int | None = None, **worker: int) -> int:
        return MemoryBudget.of(
            ConsumerSettings(
                application_name="orders",
                streams=("orders",),
                worker=worker,
                retrieval={} if prefetch is None else {"prefetch_max_bytes": prefetch},
            )
        ).max_bytes

    assert limit() == 536_870_912
    assert limit(MIB) == 536_870_912
    assert limit(512 * MIB) == 2048 * MIB, "the prefetch that was set before has its room"
    assert limit(512 * MIB, record_memory_max_bytes=LIMIT) == LIMIT


def test_results_leave_the_part_of_reading() -> None:
    """With default settings: the prefetch, and a response for each of the four threads."""
    memory = MemoryBudget.of(ConsumerSettings(application_name="orders", streams=("orders",)))
    room = memory.reserve_result()
    assert room == (512 - 128 - 4 * 12) * MIB
    for _thread in range(4):
        assert memory.may_read(), "reading is not slower while a result is written"
        memory.change({"prefetch": 12 * MIB})
    memory.change({"prefetch": 128 * MIB})
    assert not memory.may_read()
    assert memory.used_bytes == memory.max_bytes
    assert memory.reserve_result() == 0
    memory.change({"result": -room})
    assert memory.reserve_result() == room


class Slow:
    """Waits in each of its first calls until reading waits for the batch."""

    def __init__(self, watched: Watched, calls: int) -> None:
        self._watched = watched
        self._left = calls
        self.waited: list[dict[str, int]] = []

    def wait(self) -> None:
        if self._left:
            self._left -= 1
            (budget,) = self._watched.budgets
            deadline = time.monotonic() + DEADLINE_SECONDS
            while budget.counts()["prefetch"] < LIMIT // 4:
                assert time.monotonic() < deadline, f"reading does not go on: {budget.counts()}"
                time.sleep(0.01)
            self.waited.append(dict(budget.counts()))


def records_of(streams: list[str], number: int) -> list[tuple[str, bytes]]:
    """Records of all sizes, 1 MiB in the middle, and one of 10 MiB for each stream."""
    rng = random.Random(1)
    small = [
        (rng.choice(streams), bytes([n % 256]) * rng.randint(1, 2 * MIB)) for n in range(number)
    ]
    for stream in streams:
        small.insert(len(small) // 2, (stream, LARGE))
    return small


def runs_within_the_limit(pipeline: KinesisPipeline, watched: Watched, slow: Slow) -> None:
    streams = list(pipeline.settings.streams)
    records = records_of(streams, 110)
    with PipelineTest(pipeline, shards=2) as test:
        for stream in streams:
            listed = test.kinesis.call("DescribeStreamSummary", StreamName=stream)
            arn = listed["StreamDescriptionSummary"]["StreamARN"]
            test.kinesis.call("UpdateMaxRecordSize", StreamARN=arn, MaxRecordSizeInKiB=10_240)
        for stream, data in records:
            test.put(data, stream=stream)
        summary = test.run()
        rows = test.rows()
    assert sorted(row["size"] for row in rows) == sorted(len(data) for _, data in records)
    (budget,) = watched.budgets
    assert sum(len(data) for _, data in records) > 1.5 * LIMIT
    assert len(slow.waited) > 1
    assert all(counts["batch"] > 0 for counts in slow.waited), "reading goes on beside a batch"
    assert budget.peak_bytes <= LIMIT, summary
    assert budget.peak_bytes > LIMIT // 4, "it was used"
    counts = budget.counts()
    assert (counts["prefetch"], counts["result"]) == (0, 0)
    print(f"peak {budget.peak_bytes / MIB:.1f} MiB, {slow.waited}")


def pipeline_of(**function: Callable[..., object]) -> KinesisPipeline:
    return KinesisPipeline(
        "orders",
        ["orders", "returns"],
        DeltaSink("s3://nowhere/orders"),
        settings_overrides={"worker": {"record_memory_max_bytes": LIMIT}},
        **function,  # type: ignore[arg-type]
    )


def test_an_arrow_function_that_is_slow(watched: Watched) -> None:
    slow = Slow(watched, 2)

    def function(records: pa.Table) -> pa.Table:
        slow.wait()
        sizes = [len(data) for data in records.column("data").to_pylist()]
        return pa.table({"size": sizes, "data": records.column("data")})

    runs_within_the_limit(pipeline_of(transform_arrow=function), watched, slow)


@pytest.mark.spark
def test_a_spark_function_that_is_slow(spark, watched: Watched) -> None:
    """Records, their copy for Spark, and a result of twice their size."""
    slow = Slow(watched, 2)

    def function(records):
        slow.wait()
        return records.selectExpr("length(data) AS size", "concat(data, data) AS twice")

    runs_within_the_limit(pipeline_of(transform=function), watched, slow)
