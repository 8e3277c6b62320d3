"""A tick waits for a lease that expires shortly, and for a worker that starts."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from dagster import DagsterRunStatus as S

from kcl_pipeline.leader.assign import CycleReport
from kcl_pipeline.leases.application import Pause
from kcl_pipeline.orchestration.leader import (
    LONGEST_SECONDS,
    START_SECONDS,
    run_cycles,
)
from kcl_pipeline.planning.model import Move, Plan
from tests.support.dagster_fakes import (
    FakeCycle,
    FakePipeline,
    ManualClock,
    leases,
    led,
    worker,
)
from tests.support.leader_world import World, settled
from tests.support.sensor_stage import (  # noqa: F401 (fixtures)
    Stage,
    instance_fixture,
)

LED = CycleReport(led=True)
MOVES = Plan("balanced", (Move("s", None, "a", "r"),))


def ticks(world, cycle):
    """Run a tick every five seconds, and the workers every second; yield the seconds of a tick."""
    for second in range(60):
        for living in list(world.workers.values()):
            living.second()
        began = world.clock.monotonic()
        if second % 5 == 0:
            run_cycles(cycle, 10.0, 20.0, world.clock)
            yield world.clock.monotonic() - began
        world.clock.advance(max(began + 1 - world.clock.monotonic(), 0.0))


def test_leases_of_a_dead_worker_move_when_they_expire_and_not_a_tick_later():
    world = settled(World(shards=4), "a", "b")
    ticking = ticks(world, world.leaders.pop("leader"))
    next(ticking)
    next(ticking)
    world.kill("b")
    seen_at = world.clock.monotonic()
    for _ in ticking:
        if set(world.owners().values()) == {"a"}:
            break
    assert 10.0 < world.clock.monotonic() - seen_at < 10.1


def test_leases_of_the_living_cost_no_wait():
    world = settled(World(shards=4), "a", "b")
    assert set(ticks(world, world.leaders.pop("leader"))) == {0.0}


class Ticking:
    """One tick with the given expiries, from the start of its cycle, and reports."""

    def __init__(self, *expiries, reports=(LED,), failover=10.0, seconds=0.0):
        self.clock = ManualClock()
        self.cycle = FakeCycle(reports)
        self.cycle.expiries = list(expiries)
        run_once = self.cycle.run_once

        def slow(deadline_seconds):
            self.clock.advance(seconds)
            return run_once(deadline_seconds)

        self.cycle.run_once = slow
        began = self.clock.monotonic()
        self.report = run_cycles(self.cycle, failover, 20.0, self.clock)
        self.seconds = self.clock.monotonic() - began


def test_the_second_cycle_has_the_rest_of_the_time_and_its_report_counts():
    later = CycleReport(led=True, expired=("s",))
    tick = Ticking(3.5, reports=(CycleReport(led=True), later), seconds=2.0)
    assert tick.report is later
    assert tick.seconds == pytest.approx(2.0 + 1.52 + 2.0)
    assert tick.cycle.deadlines == [20.0, pytest.approx(20.0 - 2.0 - 1.52)]


def test_a_lease_that_expires_during_the_first_cycle_is_not_left_to_the_next_tick():
    """It had not expired when that cycle began to read."""
    world = settled(World(shards=4), "a", "b")
    cycle = world.leaders.pop("leader")
    ticking = ticks(world, cycle)
    next(ticking)
    next(ticking)
    world.kill("b")
    seen_at = world.clock.monotonic()
    world.rows.store.before_call = lambda operation, key: world.clock.advance(
        0.1 if operation == "Scan" else 0.0
    )
    for _ in ticking:
        if set(world.owners().values()) == {"a"}:
            break
    assert 10.0 < world.clock.monotonic() - seen_at < 10.5


def test_there_is_one_wait_in_a_tick():
    assert Ticking(0.1, 0.1, 0.1).cycle.calls == 2


@pytest.mark.parametrize(
    ("expiry", "failover"), [(math.inf, 10.0), (LONGEST_SECONDS, 10.0), (1.5, 3.0)]
)
def test_an_expiry_that_is_not_near_is_not_waited_for(expiry, failover):
    tick = Ticking(expiry, failover=failover)
    assert (tick.cycle.calls, tick.seconds) == (1, 0.0)


@pytest.mark.parametrize(
    "report",
    [
        CycleReport(led=False),
        CycleReport(led=True, error="throttled"),
        CycleReport(led=True, created=("s",)),
        CycleReport(led=True, deleted=("s",)),
        CycleReport(led=True, plan=MOVES),
    ],
)
def test_a_cycle_with_news_is_the_last_one(report):
    tick = Ticking(0.1, reports=(report,))
    assert tick.report is report
    assert tick.cycle.calls == 1


def test_a_slow_cycle_is_not_repeated():
    assert Ticking(10.5, seconds=9.0).cycle.calls == 2
    assert Ticking(10.5, seconds=9.5).cycle.calls == 1


def test_the_wait_ends_when_the_process_ends(monkeypatch):
    answers = [True, True, False]
    ending = SimpleNamespace(is_alive=lambda: answers.pop(0))
    monkeypatch.setattr(threading, "main_thread", lambda: ending)
    tick = Ticking(1.5)
    assert tick.cycle.calls == 1
    assert tick.seconds == pytest.approx(0.2)


def test_a_tick_of_the_sensor_waits(instance):
    pipeline = FakePipeline(cycle=FakeCycle([CycleReport(led=True)]))
    pipeline.cycle.expiries = [0.5]
    stage = Stage(instance, pipeline)
    stage()
    assert pipeline.cycle.calls == 2


def waiting(owner):
    return led(leases(4, [owner]), (), plan=Plan("balanced", ()))


ASSIGNED = waiting("w")
WAITS = waiting(None)


def started(*reports, is_starting=True, misses_table=False, seconds=0.0):
    """Run one tick while a worker starts; return the number of cycles, and the seconds."""
    clock, cycle = ManualClock(), FakeCycle(reports)
    cycle.misses_table = misses_table
    run_once = cycle.run_once

    def slow(deadline_seconds):
        clock.advance(seconds)
        return run_once(deadline_seconds)

    cycle.run_once = slow
    began = clock.monotonic()
    report = run_cycles(cycle, 10.0, 20.0, clock, lambda _: is_starting)
    assert report is reports[min(cycle.calls, len(reports)) - 1]
    return cycle.calls, clock.monotonic() - began


def test_leases_are_assigned_to_a_worker_that_reports_during_the_tick():
    calls, seconds = started(WAITS, WAITS, WAITS, ASSIGNED)
    assert (calls, seconds) == (4, pytest.approx(1.5))


def test_a_tick_waits_for_the_tables_that_the_first_worker_creates():
    missing = CycleReport(led=False)
    calls, seconds = started(missing, missing, ASSIGNED, misses_table=True)
    assert (calls, seconds) == (3, pytest.approx(1.0))


def test_the_next_tick_goes_on_with_the_wait():
    calls, seconds = started(WAITS)
    assert seconds <= START_SECONDS
    assert calls == 6


def test_slow_cycles_are_further_apart():
    """So the scans of a large application cost at most a quarter of the time of a tick."""
    calls, seconds = started(replace(WAITS, seconds=0.5), seconds=0.5)
    assert calls == 2
    assert seconds <= START_SECONDS


@pytest.mark.parametrize(
    "report",
    [
        ASSIGNED,
        CycleReport(led=False),
        replace(WAITS, plan=MOVES),
        replace(WAITS, pause=Pause(by="ann")),
    ],
)
def test_a_tick_that_misses_no_worker_does_not_wait(report):
    assert started(report) == (1, 0.0)


def test_a_tick_does_not_wait_for_a_worker_that_nobody_starts():
    assert started(WAITS, is_starting=False) == (1, 0.0)


@pytest.mark.parametrize(
    ("status", "age", "reports", "cycles"),
    [
        (S.STARTED, 5.0, False, 6),
        (S.QUEUED, 5.0, False, 6),
        (S.STARTED, 5.0, True, 1),
        (S.STARTED, 100.0, False, 1),
        (S.CANCELING, 5.0, False, 1),
    ],
)
def test_a_worker_starts_while_its_run_is_young_and_it_does_not_report(
    instance, status, age, reports, cycles
):
    stage = Stage(instance, FakePipeline())
    run = stage.run(status)
    created = instance.get_run_record_by_id(run.run_id).create_timestamp.timestamp()
    stage.clock.advance(created + age - 5.0 - stage.clock.wall())
    workers = (worker(stage.worker_of(run)),) if reports else ()
    stage.pipeline.cycle.reports = [replace(WAITS, workers=workers)]
    stage()
    assert stage.pipeline.cycle.calls == cycles
