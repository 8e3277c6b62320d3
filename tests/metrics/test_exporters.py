"""From events to log lines and figures."""

import inspect
import logging
import sys
import types

import pytest

from kcl_pipeline import events as ev
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.metrics.exporters import LoggingEvents, fan_out, level_of, name_of, text_of
from kcl_pipeline.metrics.observations import HeldLeaseCount, Kind, current_leases, observations
from kcl_pipeline.metrics.otel import OtelEvents, otel_attributes, otel_name
from kcl_pipeline.position import Position

BATCH = ev.BatchCommitted(
    "w1", "b-1", 100, 2048, ("shardId-1",), {"prepare": 4.0, "write": 20.0, "commit": 6.0}, 7
)

SAMPLES = [
    ev.WorkerStarted("w1"),
    ev.WorkerStopped("w1", "stopped"),
    ev.LeaseGained("w1", "shardId-1", 4),
    ev.LeaseLost("w1", "shardId-1", "renewal refused"),
    ev.LeaseReleased("w1", "shardId-1"),
    ev.HandoffStarted("shardId-1", "w1", "w2"),
    ev.HandoffCompleted("shardId-1", "w1", "w2", 1.5),
    ev.ShardEnded("w1", "123:orders:9:shardId-1", ("123:orders:9:shardId-3",)),
    BATCH,
    ev.BatchRefused("w1", "b-1", ("shardId-1",), "lost"),
    ev.PendingResolved("w1", "shardId-1", landed=True),
    ev.RecordsDeadLettered("w1", "shardId-1", 3, "ValueError"),
    ev.AggregatesRejected("shardId-1", "7", 1, 2, 3),
    ev.ShardPaused("w1", "shardId-1", "3 of 4 records fail", 2, 30.0, 60.0),
    ev.ShardResumed("w1", "shardId-1", 3, 90.0),
    ev.RecordsLost("w1", "shardId-1", ev.LossReason.ROW_DELETED, Position("7")),
    ev.ShardStalled("w1", "123:orders:9:shardId-1", ev.StallStep.READING, 120.0, "no answer"),
    ev.StreamsDiffer("w1", ("clicks",)),
    ev.StreamUnavailable("w1", "clicks", "not found"),
    ev.WorkerHung("w1", ev.HangStep.WRITING, 900.0, ("shardId-1",), "thread a:\n  b.py:1 c"),
    ev.WorkerResumed("w1"),
    ev.WorkerIdShared("w1", "run-2"),
    ev.AnnouncementRejected("_kcl_pipeline/announced/0.json", "it is malformed", True),
    ev.AwsTrouble("GetRecords of shardId-1", "throttled"),
    ev.LeaderElected("w1"),
    ev.LeadershipLost("w1", "released"),
    ev.LeasesCreated("orders", ("shardId-1", "shardId-2"), "empty table"),
    ev.LeaseDeleted("shardId-1", "ended"),
    ev.HoleFound("orders", "a gap", 1),
    ev.PlanMade("balanced", 2, 1, 0, 3.0),
    ev.LeaseMoved("shardId-1", "w1", "w2", graceful=True, reason="balance"),
    ev.MoveRefused("shardId-1", "w2"),
    ev.CycleFailed("boom", 1),
    ev.CpuSourceSkipped("EcsCpu", "TimeoutError: no answer"),
    ev.RowRejected("orders", "shardId-1", "checkpoint is missing"),
]
HEALTHY = {
    ev.WorkerResumed,
    ev.ShardResumed,
    ev.WorkerStarted,
    ev.WorkerStopped,
    ev.LeaseGained,
    ev.LeaseReleased,
    ev.HandoffStarted,
    ev.HandoffCompleted,
    ev.ShardEnded,
    ev.BatchCommitted,
    ev.PendingResolved,
    ev.LeaderElected,
    ev.LeadershipLost,
    ev.LeasesCreated,
    ev.LeaseDeleted,
    ev.HoleFound,
    ev.PlanMade,
    ev.LeaseMoved,
    ev.MoveRefused,
}


def test_the_samples_are_all_events_there_are():
    every = {
        c
        for _, c in inspect.getmembers(ev, inspect.isclass)
        if issubclass(c, ev.Event) and c is not ev.Event
    }
    assert {type(s) for s in SAMPLES} == every


@pytest.mark.parametrize("event", SAMPLES, ids=name_of)
def test_nothing_above_info_is_logged_in_good_health(event):
    assert (level_of(event) <= logging.INFO) is (type(event) in HEALTHY)


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (BATCH, logging.DEBUG),
        (ev.WorkerStopped("w1", "failed"), logging.ERROR),
        (ev.WorkerStopped("w1", "hung"), logging.ERROR),
        (ev.HandoffCompleted("k", "a", "b", 30.0, forced=True), logging.WARNING),
        (ev.HoleFound("orders", "a gap", 2), logging.WARNING),
        (ev.PlanMade("s", 0, 0, 0, 1.0), logging.DEBUG),
        (ev.PlanMade("s", 1, 1, 0, 1.0), logging.INFO),
        (ev.PlanMade("s", 0, 2, 2, 1.0), logging.WARNING),
        (ev.CycleFailed("x", 2), logging.ERROR),
        (ev.ShardStalled("w", "k", ev.StallStep.WAITING_FOR_PARENT, 120.0), logging.INFO),
        (ev.ShardStalled("w", "k", ev.StallStep.WAITING_FOR_PARENT, 9.0, "no"), logging.WARNING),
        (ev.ShardStalled("w", "k", ev.StallStep.ENDING, 120.0), logging.WARNING),
        (ev.RecordsLost("w1", "k", ev.LossReason.SHARD_NOT_LISTED), logging.ERROR),
    ],
)
def test_levels_that_depend_on_what_happened(event, level):
    assert level_of(event) == level


def test_a_log_line_is_for_people_and_its_attributes_for_programs(caplog):
    caplog.set_level(logging.INFO, "kcl_pipeline.events")
    sink = LoggingEvents()
    sink(ev.LeaseMoved("shardId-1", None, "w2", graceful=False, reason="nobody held it"))
    sink(BATCH)
    (record,) = caplog.records
    assert (
        record.getMessage()
        == "lease_moved lease_key=shardId-1 from_worker=None to_worker=w2 graceful=False "
        "reason='nobody held it'"
    )
    assert record.kcl_event == "lease_moved"
    assert record.kcl["from_worker"] is None


def test_the_stacks_follow_the_line_of_a_hung_worker(caplog):
    event = ev.WorkerHung("w1", ev.HangStep.WRITING, 900.0, ("a",), "thread a:\n  b.py:1 c")
    LoggingEvents()(event)
    (record,) = caplog.records
    line = "worker_hung worker_id=w1 step=writing seconds=900.0 lease_keys=('a',)"
    assert record.getMessage() == f"{line}\n{event.stacks}"
    assert text_of(event) == line
    (count,) = observations(event)
    assert (count.name, count.attributes["WorkerIdentifier"]) == ("WorkerHung", "w1")


def test_a_stalled_shard_is_a_line_with_its_step_and_a_counter(caplog):
    event = ev.ShardStalled("w1", "123:orders:9:shardId-1", ev.StallStep.ENDING, 120.0, "no answer")
    LoggingEvents()(event)
    (record,) = caplog.records
    assert record.getMessage() == (
        "shard_stalled worker_id=w1 lease_key=123:orders:9:shardId-1 step=ending seconds=120.0 "
        "error='no answer'"
    )
    (count,) = observations(event)
    assert (count.name, count.attributes["Step"], count.attributes["ShardId"]) == (
        "ShardStalled",
        "ending",
        "shardId-1",
    )


def test_lost_records_are_an_error_line_with_the_range_and_a_counter_with_the_reason(caplog):
    caplog.set_level(logging.ERROR, "kcl_pipeline.events")
    event = ev.RecordsLost("w1", "123:orders:9:shardId-1", ev.LossReason.ROW_DELETED, Position("7"))
    LoggingEvents()(event)
    (record,) = caplog.records
    assert record.getMessage() == (
        "records_lost reporter=w1 lease_key=123:orders:9:shardId-1 reason=row_deleted after=7 "
        "until=None first_arrival_millis=None last_arrival_millis=None stream=None before=None"
    )
    (count,) = observations(event)
    assert (count.name, count.value, count.attributes["Reason"]) == (
        "RecordsLost",
        1,
        "row_deleted",
    )


@pytest.mark.parametrize(
    ("owner", "shown"),
    [
        ("w1", "owner_name=w1"),
        ("a b", "owner_name='a b'"),
        ("x\nlease_gained worker_id=forged", "owner_name='x\\nlease_gained worker_id=forged'"),
        ("x=1", "owner_name='x=1'"),
        ("\x1b[2J", "owner_name='\\x1b[2J'"),
        ("\u2028", "owner_name='\\u2028'"),
        ("", "owner_name=''"),
        ("y" * 1001, "owner_name='" + "y" * 1000 + "... (1001 characters)'"),
    ],
)
def test_what_others_wrote_cannot_forge_a_log_line(owner, shown):
    line = text_of(ev.LeaderElected(owner, ("z\n" * 3)[:-1]))
    assert shown in line
    assert line.isprintable()
    keys = tuple(f"{number}\n" for number in range(7))
    assert text_of(ev.LeasesCreated("s", keys, "r")).isprintable()
    assert text_of(ev.LeasesCreated("s", keys[:2], "r")).isprintable()


def test_long_lists_are_cut_in_the_line_only(caplog):
    caplog.set_level(logging.INFO, "kcl_pipeline.events")
    keys = tuple(f"shardId-{n}" for n in range(100))
    LoggingEvents()(ev.LeasesCreated("orders", keys, "new stream"))
    assert "100 in all" in caplog.text
    assert "shardId-50" not in caplog.text
    assert caplog.records[0].kcl["lease_keys"] == keys


@pytest.mark.parametrize("event", SAMPLES, ids=name_of)
def test_every_event_can_be_logged_and_observed(event, caplog):
    caplog.set_level(logging.DEBUG, "kcl_pipeline.events")
    LoggingEvents()(event)
    assert caplog.records[0].getMessage().startswith(name_of(event))
    for observation in observations(event):
        assert otel_name(observation.name).startswith("aws.kinesis.client.")


def test_a_sink_that_fails_does_not_keep_events_from_the_others(caplog):
    seen = []

    def broken(event):
        raise RuntimeError("full disk")

    sink = fan_out(seen.append, broken, seen.append)
    sink(SAMPLES[0])
    sink(SAMPLES[1])
    assert seen == [SAMPLES[0], SAMPLES[0], SAMPLES[1], SAMPLES[1]]
    assert len(caplog.records) == 1, "the first failure is logged, the others are not"


def test_figures_of_a_batch():
    found = {o.name: o for o in observations(BATCH)}
    assert found["RecordsProcessed"].value == 100
    assert (found["DataBytesProcessed"].value, found["DataBytesProcessed"].unit) == (2048, "By")
    assert found["Time"].value == 30.0
    assert found["RecordProcessor.processRecords.Time"].value == 20.0
    assert found["UpdateLease.Time"].value == 4.0
    assert found["SinkCommit.Time"].value == 6.0
    assert all(
        o.attributes == {"Operation": "ProcessTask", "WorkerIdentifier": "w1"}
        for o in found.values()
    )


def test_multi_stream_leases_carry_their_stream():
    (ended,) = observations(ev.ShardEnded("w1", "123:orders:9:shardId-1", ()))
    assert ended.attributes["StreamId"] == "123:orders:9"
    assert ended.attributes["ShardId"] == "shardId-1"
    (ended,) = observations(ev.ShardEnded("w1", "shardId-1", ()))
    assert "StreamId" not in ended.attributes


def test_held_leases_are_counted_through_gain_loss_and_handoff():
    held = HeldLeaseCount()
    story = [
        (ev.LeaseGained("w1", "a", 1), 1),
        (ev.LeaseGained("w1", "b", 1), 2),
        (ev.LeaseGained("w1", "b", 2), 2),
        (ev.HandoffCompleted("a", "w1", "w2", 1.0), 1),
        (ev.LeaseLost("w1", "a", "late"), 1),
        (ev.LeaseReleased("w1", "b"), 0),
    ]
    for event, count in story:
        assert held.after(event) == (current_leases("w1", count),)
    assert held.after(BATCH) == ()
    held.after(ev.LeaseGained("w1", "c", 1))
    assert held.after(ev.WorkerStopped("w1", "stopped")) == (current_leases("w1", 0),)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("MillisBehindLatest", "consumer.lag.duration"),
        ("DataBytesProcessed", "records.size"),
        ("NumWorkers", "workers"),
        ("RenewLease.Time", "renew_lease.duration"),
        ("Time", "duration"),
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


class Meter:
    """What a meter of OpenTelemetry's API offers, writing down its calls."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str, str]] = []
        self.recorded: list[tuple[str, str, float, dict]] = []

    def _instrument(self, kind, method, name, unit):
        self.made.append((kind, name, unit))
        return types.SimpleNamespace(
            **{
                method: lambda value, attributes: self.recorded.append(
                    (method, name, value, attributes)
                )
            }
        )

    def create_counter(self, name, unit="", description=""):
        return self._instrument("counter", "add", name, unit)

    def create_gauge(self, name, unit="", description=""):
        return self._instrument("gauge", "set", name, unit)

    def create_histogram(self, name, unit="", description=""):
        return self._instrument("histogram", "record", name, unit)


def test_events_reach_the_instruments_of_the_meter():
    meter = Meter()
    sink = OtelEvents(meter)
    sink(ev.LeaseGained("w1", "shardId-1", 1))
    sink(ev.LeaseGained("w1", "shardId-2", 1))
    sink.record_lag("w1", {"shardId-1": 1500})
    assert meter.made == [
        ("counter", "aws.kinesis.client.new_leases_discovered", "1"),
        ("gauge", "aws.kinesis.client.current_leases", "1"),
        ("histogram", "aws.kinesis.client.consumer.lag.duration", "ms"),
    ], "an instrument is made once"
    assert [(method, value) for method, _, value, _ in meter.recorded] == [
        ("add", 1),
        ("set", 1),
        ("add", 1),
        ("set", 2),
        ("record", 1500),
    ]
    assert meter.recorded[-1][3]["aws.kinesis.shard.id"] == "shardId-1"


def test_every_kind_of_observation_has_an_instrument():
    meter = Meter()
    sink = OtelEvents(meter)
    for event in SAMPLES:
        sink(event)
    assert {kind for kind, _, _ in meter.made} == set(Kind)


def test_without_opentelemetry_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(SettingsError, match=r"kcl-pipeline\[otel\]"):
        OtelEvents()


def test_the_global_meter_is_used_when_opentelemetry_is_there(monkeypatch):
    asked = []
    module = types.ModuleType("opentelemetry.metrics")
    module.get_meter = lambda *a: asked.append(a) or Meter()
    monkeypatch.setitem(sys.modules, "opentelemetry", types.ModuleType("opentelemetry"))
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", module)
    OtelEvents()(SAMPLES[0])
    assert asked[0][0] == "software.amazon.kinesis"
