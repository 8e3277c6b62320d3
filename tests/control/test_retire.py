"""Retire an application on in-memory tables: who is alive, lost answers, and parts that fail."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kcl_pipeline.aws import Removals
from kcl_pipeline.control.retire import Retiring
from kcl_pipeline.errors import (
    AccessDeniedError,
    ApplicationInUseError,
    ApplicationPausedError,
    IncompatibleTableError,
    SettingsError,
    UnavailableError,
)
from kcl_pipeline.kinesis.fan_out.removal import RegisteredConsumer
from kcl_pipeline.leases.application import Pause
from kcl_pipeline.leases.coordinator import LeaderLock
from kcl_pipeline.leases.deletion import Presence, TableFound
from kcl_pipeline.leases.row import string
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.testing.sink import MemoryTable
from tests.support.layouts import LayoutWorld
from tests.support.operator_world import OperatorWorld

CREATED = 1_000.0


class Parts:
    """What is there, and the calls. `answers` are raised once each: (when, error)."""

    def __init__(self):
        self.there = {}
        self.calls = []
        self.faults = {}
        self.denied = set()
        self.hook = lambda name: None

    def delete(self, name):
        self.calls.append(name)
        self.hook(name)
        if name in self.denied:
            raise AccessDeniedError(f"DeleteTable on {name}: denied", operation="DeleteTable")
        faults = self.faults.get(name, [])
        fault = faults.pop(0) if faults else None
        if fault != "before":
            self.there.pop(name, None)
        if fault is not None:
            raise UnavailableError(f"{name}: no answer", operation="DeleteTable")


class Table:
    def __init__(self, parts, name, table_id="id-1"):
        self.name, self.parts = name, parts
        parts.there[name] = table_id

    def find(self):
        found = self.parts.there.get(self.name)
        return None if found is None else TableFound(self.name, found, 3, 0, CREATED)

    def presence(self, found):
        now = self.parts.there.get(found.name)
        return Presence.THERE if now == found.table_id else Presence.GONE

    def delete(self, found):
        self.parts.delete(found.name)


class Consumers:
    name = "orders"

    def __init__(self, parts, created=CREATED + 1):
        self.parts, self.created = parts, created
        parts.there["consumer"] = "arn:consumer-1"

    def arn_of(self, stream_name):
        return f"arn:{stream_name}"

    def find(self, stream_arn):
        found = self.parts.there.get("consumer")
        if found is None:
            return None
        return RegisteredConsumer(stream_arn, self.name, found, self.created)

    def deregister(self, consumer):
        self.parts.delete("consumer")


class RetireWorld(OperatorWorld):
    def __init__(self, **options):
        super().__init__(**options)
        self.parts = Parts()
        self.observed = []
        self.tables = [Table(self.parts, name) for name in ("leases", "metrics", "state")]
        self.consumers = Consumers(self.parts)
        self.put(*(b"%d" % n for n in range(5)))
        self.work_until(lambda: len(self.data()) == len(self.sent))

    def retiring(self, app=None):
        app = app or self.app
        lease, workers, state = self.tables
        removals = Removals(lambda: ((workers, lease), state), self.consumers)
        return Retiring(app, removals, MemoryTable(), on_wait=self.observed.append)

    def pause(self):
        return self.coordinator.read_control().pause


def silent(step):
    """A process that only does this step, in the place of a worker."""
    return SimpleNamespace(
        lease_tick=step,
        lead_tick=lambda: None,
        fetch_tick=lambda: None,
        process_tick=lambda: None,
        reporter=SimpleNamespace(drain_requested=False),
    )


def dead_world(**options):
    world = RetireWorld(**options)
    for name in list(world.running):
        world.crash(name)
    return world


def test_a_living_worker_is_named_and_nothing_changes():
    world = RetireWorld(shards=2, workers=("w-1", "w-2"))
    world.crash("w-2")
    pauses, put = [], world.coordinator.put_pause
    world.coordinator.put_pause = lambda *given, **named: (
        pauses.append(given) or put(*given, **named)
    )
    with pytest.raises(ApplicationInUseError) as refused:
        world.retiring().retire("orders")
    assert not pauses
    text = str(refused.value)
    assert "the worker w-1 has reported" in text
    assert "the leader w-1 has renewed its lock" in text
    assert "w-2" not in text
    assert not world.parts.calls
    assert world.pause() is None
    assert world.running["w-1"].reporter.drain_requested is False


def test_a_leader_without_workers_is_alive():
    """Such as the sensor, which would start workers that create the tables again."""
    world = dead_world()
    leader = world.make_leader("sensor")
    while not leader.run_once().led:
        world.clock.advance(5)
    world.running["sensor"] = silent(leader.run_once)
    with pytest.raises(ApplicationInUseError, match="the leader sensor has renewed its lock"):
        world.retiring().retire("orders")
    assert not world.parts.calls


def test_a_worker_is_alive_if_it_only_renews_its_leases():
    world = dead_world(shards=1)
    world.rows.deregister("w-1")
    (lease,) = world.leases.list_leases().leases
    counter = [lease.counter]

    def renew():
        counter[0] += 1
        row = world.leases.rows()[lease.lease_key]
        world.leases.plant({**row, "leaseCounter": {"N": str(counter[0])}})

    world.running["java"] = silent(renew)
    with pytest.raises(ApplicationInUseError, match="the worker w-1 renews its leases"):
        world.retiring().retire("orders")


@pytest.mark.parametrize("days", [-30, 30])
def test_the_clocks_of_two_hosts_are_not_compared(days):
    """A stopped worker whose clock was ahead is dead; a living one whose clock is behind is not."""
    world = dead_world()
    wall = int(world.clock.wall()) + days * 86_400
    world.rows.report(WorkerMetrics("odd", wall, {"C": (1.0,)}, run_id="odd@1"))
    assert world.retiring().retire("orders").is_complete
    world = dead_world()
    world.rows.report(WorkerMetrics("odd", wall, {"C": (1.0,)}, run_id="odd@1"))
    seconds = [0]

    def report():
        seconds[0] += 1
        world.rows.report(WorkerMetrics("odd", wall + seconds[0], {"C": (1.0,)}, run_id="odd@1"))

    world.running["odd"] = silent(report)
    with pytest.raises(ApplicationInUseError, match="the worker odd has reported"):
        world.retiring().retire("orders")


def test_a_java_worker_is_observed_for_three_of_its_periods():
    world = dead_world()
    world.rows.report(WorkerMetrics("java-1", int(world.clock.wall())))
    assert world.retiring().plan().observed_seconds >= 90
    assert world.retiring().retire("orders").is_complete
    assert world.observed == [pytest.approx(90)]


def test_all_parts_are_deleted_and_a_second_call_finds_nothing():
    world = dead_world()
    world.parts.hook = lambda _: must_be_paused(world)
    plan = world.retiring().plan()
    assert {"worker w-1", "leader w-1"} <= set(plan.named)
    assert [part.name for part in plan.resources] == [
        "arn:consumer-1",
        "metrics",
        "leases",
        "state",
    ]
    assert not world.parts.calls
    done = world.retiring().retire("orders")
    assert done.is_complete
    assert not done.is_paused
    assert world.parts.calls == ["consumer", "metrics", "leases", "state"]
    assert not world.parts.there
    for table in (world.leases, world.rows, world.coordinator):
        for key in list(table.rows()):
            table.erase(key)
    again = world.retiring().retire("orders")
    assert (again.is_complete, again.results) == (True, ())


def must_be_paused(world):
    """No worker starts while parts are deleted."""
    with pytest.raises(ApplicationPausedError, match="it is being retired"):
        world.make_worker("late").start_up()


@pytest.mark.parametrize("name", ["consumer", "metrics", "leases", "state"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_answer_is_repeated(name, when):
    world = dead_world()
    world.parts.faults[name] = [when]
    assert world.retiring().retire("orders").is_complete
    assert world.parts.calls.count(name) == (2 if when == "before" else 1)


@pytest.mark.parametrize("name", ["consumer", "metrics", "leases"])
def test_a_part_that_is_denied_does_not_stop_the_others(name):
    world = dead_world()
    world.parts.denied = {name}
    done = world.retiring().retire("orders")
    assert not done.is_complete
    outcomes = {one.resource.name: one.outcome for one in done.results}
    shown = "arn:consumer-1" if name == "consumer" else name
    others = {"arn:consumer-1", "metrics", "leases"} - {shown}
    assert outcomes == {shown: "failed", "state": "kept"} | dict.fromkeys(others, "deleted")
    assert done.is_paused
    world.parts.denied = set()
    again = world.retiring().retire("orders")
    assert again.is_complete
    assert [one.resource.name for one in again.results] == [shown, "state"]


def test_the_pause_ends_if_nothing_could_be_deleted():
    world = dead_world()
    world.parts.denied = {"consumer", "metrics", "leases"}
    done = world.retiring().retire("orders")
    assert (done.is_complete, done.is_paused) == (False, False)
    assert world.pause() is None
    assert world.coordinator.put_pause(Pause("bob"), replacing=world.coordinator.read_control())
    assert world.retiring().retire("orders").is_paused, "a pause of somebody else stays"
    assert world.pause().by == "bob"


def test_nothing_is_deleted_if_a_part_cannot_be_looked_at():
    world = dead_world()

    def deny():
        raise AccessDeniedError("DescribeTable on metrics: denied", operation="DescribeTable")

    world.tables[1].find = deny
    with pytest.raises(AccessDeniedError, match="DescribeTable on metrics"):
        world.retiring().retire("orders")
    assert not world.parts.calls
    assert world.pause() is None


def test_a_worker_that_starts_before_the_pause_stops_the_retirement():
    world = dead_world()
    put = world.coordinator.put_pause

    def late(pause, *, replacing):
        if pause is not None:
            world.rows.report(WorkerMetrics("late", int(world.clock.wall()), run_id="late@1"))
        return put(pause, replacing=replacing)

    world.coordinator.put_pause = late
    with pytest.raises(ApplicationInUseError, match="the worker late has reported"):
        world.retiring().retire("orders")
    assert not world.parts.calls
    assert world.pause() is None


def test_the_name_must_be_typed():
    world = dead_world()
    for text in ("", "Orders", "orders "):
        with pytest.raises(SettingsError, match="is not the name of the application 'orders'"):
            world.retiring().retire(text)
    assert not world.observed


def test_consumers_of_others_stay():
    world = dead_world()
    world.consumers.created = CREATED - 5
    plan = world.retiring().plan()
    assert any("before the application existed" in text for text in plan.stays)
    assert "consumer" not in {part.kind for part in plan.resources}
    world.consumers.created = CREATED + 5
    arn = next(one.arn for one in world.coordinator.read_application().identity.streams)
    assert arn.startswith("arn:"), arn
    given = f"{arn}/consumer/mine:1700000000"
    retrieval = world.settings.retrieval.model_copy(update={"consumer_arns": {"orders": given}})
    settings = world.settings.model_copy(update={"retrieval": retrieval})
    plan = world.retiring(replace(world.app, settings=settings)).plan()
    assert f"the consumer {given}, which the settings name" in plan.stays
    assert "consumer" not in {part.kind for part in plan.resources}


def test_rows_of_both_layouts_are_refused():
    """Workers and a leader may be in the lease table, where they are not seen."""
    world, layouts = dead_world(), LayoutWorld()
    app = replace(world.app, leases=layouts.start().lease)
    layouts.leases.plant({"leaseKey": string("Leader"), "entityType": string("LEADER")})
    with pytest.raises(IncompatibleTableError, match=r"single-table layout of KCL 3\.5"):
        world.retiring(app).plan()
    with pytest.raises(IncompatibleTableError):
        world.retiring(app).retire("orders")
    assert not world.parts.calls


def test_an_unreadable_or_released_lock():
    world = dead_world()
    lock = world.coordinator.read_lock()
    assert world.coordinator.release_lock(lock)
    assert world.coordinator.put_lock(
        LeaderLock("gone", 8_000, "v9", is_released=True), replacing=None
    )
    assert "leader gone" not in world.retiring().plan().named
    world.coordinator.plant({"key": string("Leader"), "ownerName": {"N": "7"}})
    assert "leader an unknown process" in world.retiring().plan().named
    assert world.retiring().retire("orders").is_complete
