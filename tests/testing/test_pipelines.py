"""The test kit for users: transforms, whole pipelines and failures."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import kcl_pipeline.testing as kit
from kcl_pipeline import (
    RECORD_SCHEMA,
    BatchIdentity,
    DeltaSink,
    ForeachArrowSink,
    ForeachBatchSink,
    KinesisPipeline,
    LeaseGained,
    RecordsDeadLettered,
    SettingsError,
    ShardEnded,
    TransformFailedError,
)
from kcl_pipeline.testing import PipelineTest, make_records, run_transform

POSITION = ["shard_id", "sequence_number", "sub_sequence_number"]


def parse(records: pa.Table) -> pa.Table:
    data = records.column("data").cast(pa.string())
    is_bad = pc.starts_with(data, "bad")
    error = pc.if_else(is_bad, "it is bad", pa.nulls(len(data), pa.string()))
    return records.select(POSITION).append_column("text", data).append_column("_error", error)


def pipeline(transform=parse, streams=("orders",), **settings) -> KinesisPipeline:
    return KinesisPipeline(
        "orders",
        list(streams),
        DeltaSink("s3://nowhere/orders"),
        transform_arrow=transform,
        settings_overrides=settings,
    )


def texts(test: PipelineTest) -> list[str]:
    return sorted(row["text"] for row in test.rows())


def test_the_facade_has_the_kit_and_the_conformance_suite():
    assert len(kit.__all__) == 12
    assert all(getattr(kit, name) for name in kit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'PipelinTest'"):
        _ = kit.PipelinTest


def test_records_are_those_of_production():
    records = make_records([b"a", "b", {"c": 1}], stream="s", partition_key="k")
    assert records.schema == RECORD_SCHEMA
    assert records.column("data").to_pylist() == [b"a", b"b", b'{"c": 1}']
    assert set(records.column("partition_key").to_pylist()) == {"k"}
    assert make_records(["a"], partition_key=None).column("partition_key").null_count == 1


def test_rows_and_errors_of_a_transform():
    result = run_transform(pipeline(), ["a", "bad", "c", "bad again"])
    assert [row["text"] for row in result.rows] == ["a", "c"]
    assert result.errors == {1: "it is bad", 3: "it is bad"}
    assert "_error" not in result.rows[0]


def test_records_can_be_given_as_a_table():
    assert len(run_transform(pipeline(), make_records(["a", "b"])).rows) == 2
    assert run_transform(pipeline(None), ["a"]).rows[0]["data"] == b"a"


def test_a_transform_that_raises():
    def broken(_records: pa.Table) -> pa.Table:
        raise ZeroDivisionError("no")

    with pytest.raises(TransformFailedError) as caught:
        run_transform(pipeline(broken), ["a"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_pipeline_end_to_end():
    with PipelineTest(pipeline(), shards=2) as test:
        assert test.rows() == []
        test.put("a", "b", "bad")
        summary = test.run()
        assert (summary.reason, summary.total.records) == ("drained", 3)
        assert texts(test) == ["a", "b"]
        assert [letter["data"] for letter in test.dead_letters()] == [b"bad"]
        assert len(test.events.of(RecordsDeadLettered)) == 1
        assert len(test.events.of(LeaseGained)) == 2
        test.put("c")
        test.run()
        assert texts(test) == ["a", "b", "c"]
        folder = Path(test.pipeline.sink.uri).parent
    assert not folder.exists()


def test_a_stream_that_takes_records_without_a_key():
    def keep(records: pa.Table) -> pa.Table:
        return parse(records).append_column("key", records.column("partition_key"))

    with PipelineTest(pipeline(keep), shards=2, record_distribution="AUTO") as test:
        test.put("a", "b", "bad")
        test.put("c", partition_key="k")
        test.run()
        assert {row["text"]: row["key"] for row in test.rows()} == {"a": None, "b": None, "c": "k"}
        (letter,) = test.dead_letters()
        assert (letter["data"], letter["partition_key"]) == (b"bad", None)


def test_two_streams_and_a_split():
    with PipelineTest(pipeline(streams=["orders", "returns"])) as test:
        test.put("a")
        test.put("r", stream="returns")
        test.run()
        test.kinesis.call(
            "SplitShard",
            StreamName="orders",
            ShardToSplit="shardId-000000000000",
            NewStartingHashKey=str(2**127),
        )
        test.put("after-0")
        test.run()
        assert texts(test) == ["a", "after-0", "r"]
        assert test.events.of(ShardEnded)


@pytest.mark.parametrize("operation", ["commit", "UpdateItem", "GetRecords"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_neither_loses_nor_repeats(operation, moment):
    with PipelineTest(pipeline()) as test:
        test.put("a", "b")
        test.run()
        test.put("c")
        test.run_and_crash(**{moment: operation})
        assert test.run().reason == "drained"
        assert texts(test) == ["a", "b", "c"]


def test_a_crash_after_the_commit_leaves_the_row_and_the_lease():
    with PipelineTest(pipeline()) as test:
        test.put("a")
        test.run_and_crash(after="commit")
        assert texts(test) == ["a"]
        (lease,) = test._leases.list_leases().leases
        assert lease.owner == "worker-1"


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("operation", ["commit", "write_dead_letters", "UpdateItem", "GetRecords"])
def test_a_call_that_fails_once(operation, applied):
    with PipelineTest(pipeline()) as test:
        test.put("a", "bad")
        test.fail_next(operation, applied=applied)
        assert test.run().reason == "drained"
        assert texts(test) == ["a"]
        # A write that was applied without an answer is repeated; readers take one row of a record.
        assert len({one["sequence_number"] for one in test.dead_letters()}) == 1
        assert not test._failures.take(operation, applied=applied), "the failure did not happen"


def test_a_broken_transform_pauses_the_shard():
    def broken(_records: pa.Table) -> pa.Table:
        raise ZeroDivisionError("no")

    with PipelineTest(pipeline(broken)) as test:
        test.put(*[str(number) for number in range(30)])
        summary = test.run()
        assert summary.reason == "failed"
        assert "ZeroDivisionError" in str(summary.error)
        assert test.rows() == []


def test_the_settings_of_the_pipeline_apply():
    with PipelineTest(pipeline(batch={"failed_records": "skip"})) as test:
        test.put("a", "bad")
        test.run()
        assert texts(test) == ["a"]
        assert test.dead_letters() == []


def test_wrong_arguments():
    with PipelineTest(pipeline()) as test:
        with pytest.raises(SettingsError, match=r"'comit' is not known\. Write one of"):
            test.fail_next("comit")
        with pytest.raises(SettingsError, match="'comit' is not known"):
            test.run_and_crash(after="comit")
        with pytest.raises(SettingsError, match="needs one operation"):
            test.run_and_crash()
        with pytest.raises(AssertionError, match="without a call of write_dead_letters"):
            test.run_and_crash(after="write_dead_letters")


class Store:
    """A user's function. It keeps the texts of its calls."""

    def __init__(self):
        self.calls: list[list[str]] = []
        self.keys: list[str] = []

    def __call__(self, rows: pa.Table, identity: BatchIdentity) -> None:
        self.calls.append(rows["text"].to_pylist())
        self.keys.append(identity.key)


def function_pipeline(store: Store, **sink) -> KinesisPipeline:
    return KinesisPipeline(
        "orders", ["orders"], ForeachArrowSink(store, **sink), transform_arrow=parse
    )


def test_a_function_end_to_end():
    store = Store()
    with PipelineTest(function_pipeline(store, dead_letter_uri="s3://nowhere/dead")) as test:
        test.put("a", "bad", "b")
        summary = test.run()
        assert (summary.reason, summary.total.records) == ("drained", 3)
        assert summary.status.table_version is None
        assert [letter["data"] for letter in test.dead_letters()] == [b"bad"]
        test.put("bad")
        test.run()
        assert store.calls == [["a", "b"]], "it is not called without rows"
        assert test.rows() == []


def test_a_dead_letter_without_a_table_pauses_the_shard():
    store = Store()
    with PipelineTest(function_pipeline(store)) as test:
        test.put("bad", "a")
        summary = test.run()
        assert summary.reason == "failed"
        assert "no dead_letter_uri" in summary.error
        assert (store.calls, test.dead_letters()) == ([], [])


@pytest.mark.parametrize(
    ("when", "calls"), [({"before": "commit"}, 1), ({"after": "commit"}, 2)], ids=str
)
def test_a_function_after_a_crash(when, calls):
    """The checkpoint follows the function: a crash between the two repeats one batch."""
    store = Store()
    with PipelineTest(function_pipeline(store)) as test:
        test.put("a", "b")
        test.run_and_crash(**when)
        test.run()
        assert store.calls == [["a", "b"]] * calls
        assert len(set(store.keys)) == 1
        test.put("c")
        test.run()
        assert store.calls[calls:] == [["c"]], "the checkpoint has the first batch"


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_a_function_on_spark():
    texts = []

    def write(frame, _identity):
        texts.extend(row.text for row in frame.collect())

    given = KinesisPipeline(
        "orders",
        ["orders"],
        ForeachBatchSink(write),
        transform=lambda frame: frame.selectExpr("cast(data as string) text"),
    )
    with PipelineTest(given) as test:
        test.put("a", "b")
        assert test.run().reason == "drained"
    assert texts == ["a", "b"]
