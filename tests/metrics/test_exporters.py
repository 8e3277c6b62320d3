"""From events to log lines and figures."""

import inspect
import logging

import pytest

from kcl_pipeline import events as ev
from kcl_pipeline.metrics.exporters import LoggingEvents, fan_out, level_of, name_of, text_of
from kcl_pipeline.metrics.instruments import observations
from kcl_pipeline.position import Position
from tests.support.event_samples import BATCH, SAMPLES

HEALTHY = {
    ev.TaskFinished,
    ev.StatusMeasured,
    ev.ProcessorCalled,
    ev.ReadFinished,
    ev.CycleFinished,
    ev.ArrowMemorySkipped,
    ev.DrainWaits,
    ev.ShardsLeftToOthers,
    ev.MetricsEndpointOpened,
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
    ev.LeaderElected,
    ev.LeadershipLost,
    ev.LeasesCreated,
    ev.LeaseDeleted,
    ev.HoleFound,
    ev.PlanMade,
    ev.LeaseMoved,
    ev.MoveRefused,
    ev.DrainRequested,
    ev.ClientVersionChanged,
}


def test_the_samples_are_all_events_there_are():
    every = {
        c
        for _, c in inspect.getmembers(ev, inspect.isclass)
        if issubclass(c, ev.Event) and c not in (ev.Event, ev.Measurement)
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
    event = ev.WorkerHung(
        "w1",
        ev.HangStep.WRITING,
        900.0,
        ("a",),
        'Thread a (most recent call first):\n  File "b.py", line 1 in c',
    )
    LoggingEvents()(event)
    (record,) = caplog.records
    line = "worker_hung worker_id=w1 step=writing seconds=900.0 lease_keys=('a',)"
    assert record.getMessage() == f"{line}\n{event.stacks}"
    assert text_of(event) == line
    assert {one.instrument.name: one.value for one in observations(event)} == {
        "WorkerHung": 1,
        "HungWorkers": 1,
    }


def test_a_stalled_shard_is_a_line_with_its_step_and_a_counter(caplog):
    event = ev.ShardStalled("w1", "123:orders:9:shardId-1", ev.StallStep.ENDING, 120.0, "no answer")
    LoggingEvents()(event)
    (record,) = caplog.records
    assert record.getMessage() == (
        "shard_stalled worker_id=w1 lease_key=123:orders:9:shardId-1 step=ending seconds=120.0 "
        "error='no answer'"
    )
    (count,) = observations(event)
    assert (
        count.instrument.name,
        dict(count.attributes)["Step"],
        dict(count.attributes)["ShardId"],
    ) == (
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
    assert (count.instrument.name, count.value, dict(count.attributes)["Reason"]) == (
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
def test_every_event_can_be_logged(event, caplog):
    caplog.set_level(logging.DEBUG, "kcl_pipeline.events")
    LoggingEvents()(event)
    assert caplog.records[0].getMessage().startswith(name_of(event))


def test_a_sink_that_fails_does_not_keep_events_from_the_others(caplog):
    seen = []

    def broken(event):
        raise RuntimeError("full disk")

    sink = fan_out(seen.append, broken, seen.append)
    sink(SAMPLES[0])
    sink(SAMPLES[1])
    assert seen == [SAMPLES[0], SAMPLES[0], SAMPLES[1], SAMPLES[1]]
    assert len(caplog.records) == 1, "the first failure is logged, the others are not"
