"""The identity of an application: what is recorded, which starts fit, and what existing leases say
(both kinds of tables).
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kcl_pipeline.errors import (
    OtherApplicationError,
    SettingsError,
    UnavailableError,
    UnreadableRowError,
)
from kcl_pipeline.leases.application import (
    NOTHING_WANTED,
    ApplicationIdentity,
    Pause,
    RecordedStream,
    application_from_text,
    application_text,
    contradiction,
    successor,
)
from kcl_pipeline.leases.identity_check import check_application, ensure_application
from kcl_pipeline.leases.layout import ensure_client_version
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import LATEST, SHARD_END, TRIM_HORIZON, Position
from kcl_pipeline.shards import HashKeyRange, Shard, StreamId
from kcl_pipeline.testing.tables import create_lease

# fixtures
from tests.support.lease_tables import aws_fixture, client_fixture, tables_fixture  # noqa: F401

ARN = "arn:aws:kinesis:us-east-1:123456789012:stream/"
CLICKS = RecordedStream(ARN + "clicks", 1_000)
LATER = RecordedStream(ARN + "clicks", 5_000)
RENEWED = replace(LATER, renewed=True)
OTHER = RecordedStream(ARN + "other", 2_000)
THIRD = RecordedStream(ARN + "third", 3_000)
SINGLE = ApplicationIdentity("single_stream", (CLICKS,), "delta:/lake/rows")
SEVERAL = ApplicationIdentity("multi_stream", (CLICKS, OTHER), "delta:/lake/rows")
LEADER = replace(SINGLE, sink=None)
WHOLE = HashKeyRange(0, 2**128 - 1)
HALF = HashKeyRange(0, 2**127 - 1)


def no_shards():
    raise AssertionError("the stream is not listed")


def ensured(tables, wanted, shards=no_shards):
    found = ensure_application("app", tables.coordinator, tables.leases, wanted, shards)
    return found.identity


@pytest.fixture(name="started")
def started_fixture(tables):
    ensure_client_version(tables.coordinator, "w1", tables.clock)
    return tables


def test_the_first_start_records_what_it_is_on_the_client_version_row(started):
    before = started.rows(started.coordinator)["Migration3.0"]
    assert ensured(started, SINGLE) == SINGLE
    row = started.rows(started.coordinator)["Migration3.0"]
    assert json.loads(row.pop("kclpApplication")["S"]) == {
        "mode": "single_stream",
        "kinds": [
            {
                "prefix": ARN,
                "renewed": False,
                "initial_position": None,
                "initial_millis": None,
            }
        ],
        "streams": [[0, "clicks", 1000]],
        "sink": "delta:/lake/rows",
        "changing": False,
        "whole_aggregates": None,
    }
    assert row == before, "what a Java reader reads is untouched"
    assert list(started.rows(started.coordinator)) == ["Migration3.0"], (
        "no row that Java would move"
    )
    assert started.coordinator.read_application().identity == SINGLE


def test_the_same_start_writes_nothing_more(started):
    ensured(started, SINGLE)
    before = started.rows(started.coordinator)
    assert ensured(started, SINGLE) == SINGLE
    assert ensured(started, LEADER) == SINGLE, "a leader has no sink to compare"
    check_application("app", started.coordinator, SINGLE)
    assert started.rows(started.coordinator) == before


def test_a_leader_records_the_streams_and_the_first_worker_adds_the_sink(started):
    ensured(started, LEADER)
    assert started.coordinator.read_application().identity.sink is None
    assert ensured(started, SINGLE) == SINGLE


def test_the_client_version_row_is_rolled_forward_with_the_identity(started):
    ensured(started, SINGLE)
    row = started.rows(started.coordinator)["Migration3.0"]
    row["cv"] = {"S": "CLIENT_VERSION_3X_WITH_ROLLBACK"}
    started.plant(started.coordinator, row)
    ensure_client_version(started.coordinator, "w2", started.clock)
    assert started.coordinator.read_application().identity == SINGLE


@pytest.mark.parametrize("outcome", ["lost answer", "lost race", "changed meanwhile"])
def test_the_write_is_conditional(started, outcome):
    put = started.coordinator.put_application
    calls = []

    def racing(identity, *, replacing):
        calls.append(identity)
        if len(calls) > 1:
            return put(identity, replacing=replacing)
        if outcome == "lost answer":
            assert put(identity, replacing=replacing)
            raise UnavailableError("no answer")
        other = OTHER if outcome == "lost race" else CLICKS
        assert put(replace(SINGLE, streams=(other,), sink=None), replacing=replacing)
        return put(identity, replacing=replacing)

    started.coordinator.put_application = racing
    if outcome == "lost answer":
        with pytest.raises(UnavailableError):
            ensured(started, SINGLE)
        assert ensured(started, SINGLE) == SINGLE
    elif outcome == "lost race":
        with pytest.raises(OtherApplicationError, match="stream/other"):
            ensured(started, SINGLE)
        assert started.coordinator.read_application().identity.streams == (OTHER,)
    else:
        assert ensured(started, SINGLE) == SINGLE


def test_a_write_that_was_applied_although_its_answer_was_lost_counts(started):
    assert started.coordinator.put_application(SINGLE, replacing=None)
    assert started.coordinator.put_application(SINGLE, replacing=None)
    assert not started.coordinator.put_application(SEVERAL, replacing=None)
    record = started.coordinator.read_application()
    assert started.coordinator.put_application(SEVERAL, replacing=record)
    assert not started.coordinator.put_application(SINGLE, replacing=record)


def test_without_a_client_version_row_nothing_is_made(tables):
    assert not tables.coordinator.put_application(SINGLE, replacing=None)
    assert tables.rows(tables.coordinator) == {}


@pytest.mark.parametrize(
    ("recorded", "wanted", "sentence"),
    [
        (
            SINGLE,
            replace(SINGLE, streams=(OTHER,)),
            "the two streams have the same lease keys.*do accept",
        ),
        (
            SINGLE,
            replace(SINGLE, sink="delta:/lake/other"),
            "writes to delta:/lake/rows.*do accept",
        ),
        (SINGLE, replace(SINGLE, sink="foreach_batch"), "do accept"),
        (SINGLE, SEVERAL, "names several.*do accept"),
        (SEVERAL, SINGLE, "names one.*do accept"),
        (SEVERAL, replace(SEVERAL, streams=(THIRD,)), "none of them.*do accept"),
        (replace(SINGLE, changing=True), SINGLE, "not finished.*do accept"),
    ],
)
def test_a_start_that_does_not_fit_is_refused_in_one_sentence(recorded, wanted, sentence):
    with pytest.raises(OtherApplicationError, match=sentence) as caught:
        successor("app", recorded, wanted)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("recorded", "wanted", "expected"),
    [
        (SINGLE, SINGLE, SINGLE),
        (SEVERAL, replace(SEVERAL, streams=(OTHER,)), SEVERAL),
        (
            SEVERAL,
            replace(SEVERAL, streams=(OTHER, THIRD)),
            replace(SEVERAL, streams=(CLICKS, OTHER, THIRD)),
        ),
        (
            SEVERAL,
            replace(SEVERAL, streams=(RecordedStream(ARN + "other", 9_000),)),
            replace(SEVERAL, streams=(CLICKS, RecordedStream(ARN + "other", 9_000))),
        ),
        (replace(SINGLE, streams=(RecordedStream(ARN + "clicks"),)), SINGLE, SINGLE),
        (SINGLE, replace(SINGLE, streams=(LATER,)), replace(SINGLE, streams=(RENEWED,))),
        (replace(SINGLE, streams=(RENEWED,)), SINGLE, replace(SINGLE, streams=(RENEWED,))),
        (
            replace(SINGLE, streams=(RENEWED,)),
            replace(SINGLE, streams=(LATER,)),
            replace(SINGLE, streams=(RENEWED,)),
        ),
        (SINGLE, replace(SINGLE, streams=(RecordedStream(ARN + "clicks"),)), SINGLE),
    ],
)
def test_a_start_that_fits_may_extend_the_record(recorded, wanted, expected):
    assert successor("app", recorded, wanted) == expected


def test_a_record_names_the_streams_and_the_sink(started):
    assert ensured(started, SINGLE) == SINGLE
    row = started.rows(started.coordinator)["Migration3.0"]
    assert json.loads(row["kclpApplication"]["S"]) == {
        "mode": "single_stream",
        "kinds": [
            {
                "prefix": ARN,
                "renewed": False,
                "initial_position": None,
                "initial_millis": None,
            }
        ],
        "streams": [[0, "clicks", 1000]],
        "sink": "delta:/lake/rows",
        "changing": False,
        "whole_aggregates": None,
    }
    assert started.coordinator.read_application().identity == SINGLE


def test_the_first_worker_records_its_sink_also_after_a_leader(started):
    ensured(started, LEADER)
    assert started.coordinator.read_application().identity.sink is None
    assert ensured(started, SINGLE) == SINGLE
    assert ensured(started, LEADER) == SINGLE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "nonsense",
        '{"mode": "other", "streams": []}',
        '{"mode": "single_stream", "streams": []}',
        '{"mode": "single_stream", "kinds": [], "streams": [[0, "a", 1]]}',
        '{"mode": "single_stream", "kinds": [{"prefix": ""}], "streams": [[-1, "a", 1]]}',
        '{"mode": "single_stream", "kinds": [{"prefix": ""}], "streams": [[0, "a", -1]]}',
        '{"mode": "single_stream", "kinds": [{"prefix": ""}], "streams": [[0, "a", 1e300]]}',
        '{"mode": "single_stream", "kinds": [{"prefix": ""}], "streams": [[0, "a\\nb", null]]}',
        '{"mode": "single_stream", "kinds": [{"prefix": ""}], "streams": [[0, "a"]]}',
        '{"mode": "multi_stream", "streams": [], "sink": "' + "x" * 5_000 + '"}',
        "[" * 100_000,
        '{"mode": "multi_stream", "kinds": [], "streams": [' + '[0, "a", 1],' * 50_000 + "]}",
    ],
)
def test_a_record_that_cannot_be_read_says_so(text):
    with pytest.raises(UnreadableRowError, match="kclpApplication"):
        application_from_text(text)


@pytest.mark.parametrize("value", [{"N": "5"}, {"S": ""}, {"M": {}}])
def test_a_record_of_another_type_is_not_taken_for_none(started, value):
    row = started.rows(started.coordinator)["Migration3.0"]
    started.plant(started.coordinator, row | {"kclpApplication": value})
    with pytest.raises(UnreadableRowError, match="kclpApplication"):
        ensured(started, SINGLE)


def test_a_record_survives_a_round_trip():
    renewed = replace(SINGLE, streams=(RENEWED,))
    for identity in (SINGLE, SEVERAL, replace(SINGLE, changing=True), renewed, LEADER):
        record = application_from_text(application_text(identity))
        assert (record.identity, record.text) == (identity, application_text(identity))


def many_streams(count, name="tenant-{:05d}-events"):
    streams = tuple(
        RecordedStream(ARN + name.format(n), 1_700_000_000_123, initial_position="LATEST")
        for n in range(count)
    )
    return ApplicationIdentity("multi_stream", streams, "delta:s3://lake/orders")


def test_a_record_of_many_streams_stays_readable(started):
    wanted = many_streams(6_000)
    assert ensured(started, wanted) == wanted
    assert started.coordinator.read_application().identity == wanted
    at_odds = replace(
        wanted,
        streams=tuple(
            replace(one, initial_position=("LATEST", "TRIM_HORIZON")[n % 2])
            for n, one in enumerate(wanted.streams[:2_000])
        ),
    )
    assert application_from_text(application_text(at_odds)).identity == at_odds


def test_a_record_that_a_reader_would_refuse_is_not_written(started):
    ensured(started, many_streams(2_000))
    with pytest.raises(SettingsError, match=r"has 9000 streams, and their record has \d+ char"):
        ensured(started, many_streams(9_000))
    assert started.coordinator.read_application().identity == many_streams(2_000)


def test_a_pause_counts_also_without_a_record(started):
    pause = Pause("ann", reason="repair")
    assert started.coordinator.put_pause(pause, replacing=NOTHING_WANTED)
    assert check_application("app", started.coordinator, SINGLE).control.pause == pause
    done = ensure_application("app", started.coordinator, started.leases, SINGLE, no_shards)
    assert done.control.pause == pause


def shard(number, keys=WHOLE, begin="100", end=None):
    return Shard(f"shardId-{number}", keys, begin, end)


def lease(number, checkpoint=TRIM_HORIZON, keys=WHOLE, stream=None):
    key = f"shardId-{number}" if stream is None else f"{stream}:shardId-{number}"
    return Lease(key, checkpoint, hash_key_range=keys, stream=stream)


@pytest.mark.parametrize(
    ("leases", "shards", "reason"),
    [
        ([], [shard(0)], None),
        ([lease(0), lease(1, SHARD_END), lease(2, LATEST)], [shard(0), shard(1), shard(2)], None),
        (
            [lease(0, Position("100")), lease(1, Position("150"))],
            [shard(0), shard(1, end="150")],
            None,
        ),
        ([lease(7, Position("5"))], [shard(0)], None),
        ([lease(0, keys=None)], [shard(0)], None),
        ([lease(0, keys=HALF)], [shard(0)], "covers the hash keys"),
        ([lease(1), lease(0, Position("99"))], [shard(0), shard(1)], "99 of the lease shardId-0"),
        ([lease(0, Position("151"))], [shard(0, end="150")], "ends at 150"),
        ([lease(1, stream="1:clicks:5")], [shard(0)], "has a stream in its key"),
        # one foreign row among leases that fit costs no more than itself
        ([lease(0), lease(1, stream="1:clicks:5")], [shard(0)], None),
    ],
)
def test_leases_without_a_record_may_contradict_the_one_stream(leases, shards, reason):
    found = contradiction(leases, SINGLE, shards)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


@pytest.mark.parametrize(
    ("leases", "reason"),
    [
        ([], None),
        ([lease(0, stream="123456789012:clicks:5")], None),
        ([lease(0, stream="123456789012:gone:5"), lease(0, stream="123456789012:other:6")], None),
        ([lease(0)], "has no stream in its key"),
        ([lease(0, stream="123456789012:clicks:5"), lease(0)], None),
        ([lease(0, stream="999999999999:clicks:5")], "none of these"),
        ([lease(0, stream="123456789012:gone:5")], "none of these"),
    ],
)
def test_leases_without_a_record_may_contradict_several_streams(leases, reason):
    found = contradiction(leases, SEVERAL, ())
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


def test_leases_of_java_are_taken_over_when_they_fit_and_refused_when_not(started):
    create_lease(started.leases, lease(0, Position("120")))
    with pytest.raises(OtherApplicationError, match="covers the hash keys"):
        ensured(started, SINGLE, lambda: [shard(0, HALF)])
    assert started.coordinator.read_application() is None
    assert ensured(started, SINGLE, lambda: [shard(0)]) == SINGLE


def test_a_record_that_appears_while_the_leases_are_read_decides(started):
    """The scan hung, others recorded the application and read the
    stream, and then the stream was deleted and created again.
    """

    def shards_of_the_new_stream():
        assert started.coordinator.put_application(SINGLE, replacing=None)
        return [shard(0, begin="100")]

    create_lease(started.leases, lease(0, Position("99")))
    assert ensured(started, SINGLE, shards_of_the_new_stream) == SINGLE


def test_the_record_of_a_resolved_stream():
    stream = StreamId("clicks", arn=ARN + "clicks", created_millis=1_000)
    assert ApplicationIdentity.of([stream], is_multi_stream=False) == LEADER
    assert RecordedStream.of(StreamId("plain")).name == "plain"
    assert str(CLICKS) == f"{ARN}clicks (created 1970-01-01T00:00:01+00:00)"


def test_another_stream_of_the_recorded_name_gets_no_leases():
    """The service may describe a former stream for a moment."""
    arn = "arn:aws:kinesis:us-east-1:1:stream/orders"
    recorded = RecordedStream(arn, 2_000, renewed=True)
    now = StreamId("orders", arn=arn, created_millis=2_000)
    assert recorded.as_recorded(now) == replace(now, recreated_millis=2_000)
    assert recorded.as_recorded(replace(now, created_millis=1_000)) is None
    assert recorded.as_recorded(replace(now, created_millis=None)) is not None
