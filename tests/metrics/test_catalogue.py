"""The registry of instruments, and the values that events give them."""

from __future__ import annotations

import pytest

from kcl_pipeline import events as ev
from kcl_pipeline.metrics.exporters.prometheus import families
from kcl_pipeline.metrics.instruments import (
    INSTRUMENTS,
    HeldLeaseCount,
    Kind,
    Level,
    Unit,
    observations,
    otel_attributes,
    otel_name,
    prometheus_name,
)
from tests.support.event_samples import BATCH, SAMPLES, lag_measured

JAVA_GAUGES = {
    "CurrentLeases",
    "TotalLeases",
    "NumWorkers",
    "ExpiredLeases",
    "ActiveStreams.Count",
    "NumStreamsToSync",
    "NumWorkersWithInvalidEntry",
    "NumWorkersWithFailingWorkerMetric",
}
"""The gauges of the Java library's OpenTelemetry backend (protocol §12.3)."""


def test_each_instrument_is_fed_by_its_events_and_by_no_others():
    fed = set()
    for event in SAMPLES:
        held = HeldLeaseCount()
        for one in (*observations(event), *held.after(event)):
            fed.add((one.instrument, type(event)))
            assert set(dict(one.attributes)) <= set(one.instrument.dimensions), one
    assert fed == {(one, event) for one in INSTRUMENTS for event in one.events}


def test_names_operations_and_kinds_are_unambiguous():
    assert len({(one.name, one.operation) for one in INSTRUMENTS}) == len(INSTRUMENTS)
    assert len({(otel_name(one.name), one.kind) for one in INSTRUMENTS}) == len(
        {one.name for one in INSTRUMENTS}
    )
    for family in families().values():
        kinds = {one.prometheus_kind for one in INSTRUMENTS if prometheus_name(one) == family.name}
        assert kinds == {family.kind}


def test_kinds_are_those_of_the_java_library():
    for one in INSTRUMENTS:
        if not one.in_kcl:
            continue
        counts = Kind.GAUGE if one.name in JAVA_GAUGES else Kind.COUNTER
        assert one.kind is (counts if one.unit is Unit.COUNT else Kind.HISTOGRAM), one.name


@pytest.mark.parametrize(
    ("operation", "name", "level"),
    [
        ("ProcessTask", "MillisBehindLatest", Level.SUMMARY),
        ("ProcessTask", "RecordsProcessed", Level.SUMMARY),
        ("ProcessTask", "KinesisDataFetcher.getRecords.Time", Level.DETAILED),
        ("ApplicationTracker", "MillisBehindLatest", Level.SUMMARY),
        ("RenewAllLeases", "LostLeases", Level.SUMMARY),
        ("RenewAllLeases", "RenewLease.Success", Level.DETAILED),
        ("LeaseDiscovery", "NewLeasesDiscovered", Level.DETAILED),
        ("LeaseAssignmentManager", "ExpiredLeases", Level.SUMMARY),
        ("LeaseAssignmentManager", "FailedAssignmentCount", Level.DETAILED),
        ("LeaderDecider", "LeaderDecider:IsLeader", Level.DETAILED),
        ("ShardSyncTask", "CreateLease.Success", Level.DETAILED),
        ("MultiStreamTracker", "ActiveStreams.Count", Level.SUMMARY),
        ("PeriodicShardSyncManager", "NumStreamsToSync", Level.SUMMARY),
        ("PeriodicShardSyncManager", "NumSkippedShardSyncTask", Level.SUMMARY),
    ],
)
def test_levels_are_those_of_the_java_library(operation, name, level):
    (found,) = [one for one in INSTRUMENTS if (one.operation, one.name) == (operation, name)]
    assert (found.level, found.in_kcl) == (level, True)


def test_the_shard_sync_of_a_cycle_has_its_two_instruments():
    cycle = ev.CycleFinished(
        "w", True, 5.0, True, incomplete_streams=1, unavailable_streams=2, sync_skipped=True
    )
    values = {one.instrument.name: one.value for one in observations(cycle)}
    assert (values["NumStreamsToSync"], values["NumSkippedShardSyncTask"]) == (3, 1)


def test_values_of_a_batch():
    found = {one.instrument.name: one for one in observations(BATCH)}
    assert {name: one.value for name, one in found.items()} == {
        "RecordsProcessed": 100,
        "DataBytesProcessed": 2000,
        "Success": 1,
        "Time": 36.0,
        "RecordProcessor.processRecords.Time": 20.0,
        "ExecutorFetch.Time": 9.0,
        "SinkCommit.Time": 6.0,
        "Rewrite.Time": 1.0,
    }
    assert found["Time"].attributes == (("ShardId", "shardId-1"),)
    assert found["SinkCommit.Time"].attributes == (("WorkerIdentifier", "w1"),)
    assert {one.instrument.operation for one in found.values()} == {"ProcessTask"}


def test_a_batch_of_several_shards_has_values_for_each():
    event = ev.BatchCommitted(
        *("w1", "b", 7, 90, ("a", "b"), {"write": 2.0}, None), {"a": 3, "b": 4}, {"a": 30, "b": 60}
    )
    found = [
        (dict(one.attributes)["ShardId"], one.value)
        for one in observations(event)
        if one.instrument.name == "RecordsProcessed"
    ]
    assert found == [("a", 3), ("b", 4)]


def test_the_lag_of_the_application_is_the_largest_of_its_shards():
    found = observations(lag_measured({"a": 5, "b": 900, "c": 0}))
    assert [(one.instrument.operation, one.value) for one in found] == [
        ("ProcessTask", 900),
        ("ProcessTask", 5),
        ("ProcessTask", 0),
        ("ApplicationTracker", 900),
    ]
    assert [one.value for one in observations(lag_measured({}))] == [0]
    assert observations(lag_measured({}, unknown=1)) == ()


def test_a_process_that_does_not_lead_has_no_values_of_the_leader():
    (one,) = observations(ev.CycleFinished("w1", False, 2.0, True))
    assert (one.instrument.name, one.value) == ("LeaderDecider:IsLeader", 0)


def test_a_forced_release_is_counted_and_an_orderly_one_is_not():
    assert observations(ev.LeadershipLost("w1", "released")) == ()


def test_multi_stream_leases_carry_their_stream():
    (ended,) = observations(ev.ShardEnded("w1", "123:orders:9:shardId-1", ()))
    assert ended.attributes == (("ShardId", "shardId-1"), ("StreamId", "123:orders:9"))
    (ended,) = observations(ev.ShardEnded("w1", "shardId-1", ()))
    assert ended.attributes == (("ShardId", "shardId-1"),)


def test_held_leases_are_counted_through_gain_loss_and_handoff():
    held = HeldLeaseCount()
    story = [
        (ev.WorkerStarted("w1"), 0),
        (ev.LeaseGained("w1", "a", 1), 1),
        (ev.LeaseGained("w1", "b", 1), 2),
        (ev.LeaseGained("w1", "b", 2), 2),
        (ev.HandoffCompleted("a", "w1", "w2", 1.0), 1),
        (ev.LeaseLost("w1", "a", "late"), 1),
        (ev.LeaseReleased("w1", "b"), 0),
        (ev.LeaseGained("w1", "c", 1), 1),
        (ev.WorkerStopped("w1", "stopped"), 0),
    ]
    for event, count in story:
        (one,) = held.after(event)
        assert (one.instrument.name, one.value) == ("CurrentLeases", count)
    assert held.after(BATCH) == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("MillisBehindLatest", "consumer.lag.duration"),
        ("DataBytesProcessed", "records.size"),
        ("NumWorkers", "workers"),
        ("RenewLease.Time", "renew_lease.duration"),
        ("Time", "time"),
        ("RecordProcessor.processRecords.Time", "record_processor.process_records.duration"),
        ("LeaderDecider:IsLeader", "leader_decider.is_leader"),
        ("GetLease:Error", "get_lease.error"),
        ("DeletedStreams.Count", "streams.deleted"),
        ("Whatever.Count", "whatever"),
        ("CreateLease_TRIM_HORIZON.Success", "create_lease_trim_horizon.success"),
        ("CurrentState:3xWorker", "current_state.3x_worker"),
        ("NumOfLeasesReassignment", "num_of_leases_reassignment"),
        ("HTTPStatus", "http_status"),
        ("Phase1Worker", "phase1_worker"),
        ("Odd name", "odd_name"),
    ],
)
def test_opentelemetry_names_are_those_of_the_java_library(name, expected):
    assert otel_name(name) == f"aws.kinesis.client.{expected}"


def test_opentelemetry_names_are_not_longer_than_allowed():
    assert len(otel_name("A" * 400)) == 255


def test_opentelemetry_attributes():
    assert otel_attributes(
        {
            "Operation": "ProcessTask",
            "ShardId": "s",
            "StreamId": "t",
            "WorkerIdentifier": "w",
            "Forced": "true",
        }
    ) == {
        "aws.kinesis.operation": "ProcessTask",
        "aws.kinesis.shard.id": "s",
        "aws.kinesis.stream_name": "t",
        "aws.kinesis.consumer.name": "w",
        "aws.kinesis.forced": "true",
    }
