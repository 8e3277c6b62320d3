"""Pause and resume an application while its workers run."""

from __future__ import annotations

import pytest

from kcl_pipeline.control.pausing import Pausing
from kcl_pipeline.errors import ApplicationInUseError, ApplicationPausedError, UnavailableError
from kcl_pipeline.events import DrainRequested, LeaseMoved
from kcl_pipeline.leases.application import Pause
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.worker.summary import StopReason
from tests.support.operator_world import OperatorWorld


def busy(**options):
    world = OperatorWorld(**options)
    world.put(*(b"%d" % n for n in range(20)))
    world.work_until(lambda: len(world.data()) == len(world.sent))
    return world


def test_a_pause_ends_the_workers_and_no_lease_is_assigned():
    world = busy(shards=3, workers=("w-1", "w-2"))
    assert set(world.owners().values()) <= {"w-1", "w-2"}
    done = Pausing(world.app).pause("a new table")
    assert (done.held, done.java, done.is_new) == ({}, {}, True)
    assert world.ended == dict.fromkeys(("w-1", "w-2"), StopReason.APPLICATION_PAUSED)
    leader = world.make_leader("sensor")
    world.put(b"later")
    for _ in range(40):
        report = leader.run_once()
        world.clock.advance(1)
    assert report.led
    assert report.pause is not None
    assert report.pause.sentence.endswith("by ann: a new table")
    assert set(world.owners().values()) == {None}


def test_a_leader_assigns_nothing_to_a_java_worker_in_a_pause():
    """It does not end, and would accept the leases that were released."""
    world = busy(shards=2)
    Pausing(world.app).pause()
    leader = world.make_leader("sensor")

    def cycles():
        for _ in range(60):
            world.rows.report(WorkerMetrics("java-1", int(world.clock.wall())))
            leader.run_once()
            world.clock.advance(1)

    cycles()
    assert set(world.owners().values()) == {None}
    Pausing(world.app).resume()
    cycles()
    assert "java-1" in world.owners().values()


def test_after_a_resume_each_record_is_in_the_table_once():
    world = busy()
    Pausing(world.app).pause()
    world.put(*(b"late-%d" % n for n in range(5)))
    assert Pausing(world.app).resume().pause is not None
    world.start("w-3")
    world.work_until(lambda: len(world.data()) >= len(world.sent))
    world.work(5)
    assert world.data() == sorted(world.sent)


def test_a_worker_does_not_start_while_the_application_is_paused():
    world = busy()
    Pausing(world.app).pause("why not")
    late = world.make_worker("w-9")
    with pytest.raises(ApplicationPausedError, match="why not; resume it"):
        late.start_up()
    assert "w-9" not in world.rows.rows(), "nobody saw it"
    assert late.run(world.clock.signal()).reason is StopReason.APPLICATION_PAUSED


def test_a_worker_that_started_at_the_moment_of_the_pause_ends():
    """Its row came after the command had looked for workers."""
    world = busy()
    late = world.make_worker("w-2")
    Pausing(world.app).pause()
    late.reporter.report()
    leader = world.make_leader("sensor")
    leader.run_once()
    world.clock.advance(3)
    assert leader.run_once().led
    (event,) = world.of(DrainRequested)
    assert event.worker_id == "w-2"
    late.reporter.report()
    assert late.reporter.drains_for_pause


def test_a_lease_that_reaches_a_worker_in_a_pause_ends_the_worker():
    """A leader of the Java KCL assigns leases in a pause."""
    world = busy(shards=1)
    Pausing(world.app).pause()
    Pausing(world.app).resume()
    worker = world.start("w-2")
    assert world.app.coordinator.put_pause(
        Pause("bob"), replacing=world.app.coordinator.read_control()
    )
    (lease,) = world.leases.list_leases().leases
    assert world.leases.assign(lease, "w-2")
    for _ in range(40):
        worker.lease_tick()
        worker.process_tick()
        world.clock.advance(0.1)
    assert worker.reporter.drains_for_pause


def test_the_leases_of_a_worker_that_stopped_are_released():
    world = busy(shards=2)
    world.crash("w-1")
    done = Pausing(world.app).pause()
    assert sorted(done.evicted) == sorted(world.owners())
    assert set(world.owners().values()) == {None}
    assert done.held == {}


def test_a_worker_that_renews_keeps_its_leases_until_it_has_released_them():
    world = busy(shards=1)
    worker = world.crash("w-1")

    def renew(seconds):
        for _ in range(10):
            worker.lease_tick()
            world.clock.advance(seconds / 10)

    world.app.clock.sleep = renew
    done = Pausing(world.app).pause(wait_seconds=30)
    assert set(done.held.values()) == {"w-1"}
    assert done.evicted == ()


def test_a_java_worker_is_named_and_not_asked():
    world = busy(shards=1)
    world.crash("w-1")
    (lease,) = world.leases.list_leases().leases
    world.rows.deregister("w-1")
    world.rows.report(WorkerMetrics("java-1", int(world.clock.wall())))
    assert world.leases.assign(lease, "java-1")
    done = Pausing(world.app).pause(wait_seconds=5)
    assert done.java == {lease.lease_key: "java-1"}
    assert done.held == {}
    assert "kclpDrain" not in world.rows.rows()["java-1"]


def test_the_second_pause_and_the_second_resume_change_nothing():
    world = busy()
    first = Pausing(world.app).pause("first")
    second = Pausing(world.app).pause("second")
    assert (second.is_new, second.pause) == (False, first.pause)
    assert Pausing(world.app).resume().pause == first.pause
    assert Pausing(world.app).resume().pause is None


def test_a_lost_answer_is_recognised():
    world = busy()
    lost = []

    def lose(operation, key):
        if operation == "UpdateItem" and key == "Migration3.0" and not lost:
            lost.append(key)
            raise UnavailableError("lost", operation=operation)

    world.coordinator.hook(None, lose)
    pausing = Pausing(world.app)
    with pytest.raises(UnavailableError):
        pausing.pause("x", wait_seconds=0)
    world.coordinator.hook(None, None)
    assert pausing.pause("x", wait_seconds=0).is_new is False, "the first attempt was applied"


def test_an_application_that_never_started_is_not_paused():
    world = busy()
    world.coordinator.erase("Migration3.0")
    with pytest.raises(ApplicationInUseError, match="no worker has started yet"):
        Pausing(world.app).pause()


def test_what_java_reads_in_the_row_is_untouched():
    world = busy()
    before = world.coordinator.rows()["Migration3.0"]
    Pausing(world.app).pause()
    paused = world.coordinator.rows()["Migration3.0"]
    assert paused.keys() - before.keys() == {"kclpPause"}
    Pausing(world.app).resume()
    assert world.coordinator.rows()["Migration3.0"] == before


@pytest.mark.parametrize("value", [{"S": "{"}, {"S": "x" * 20_000}, {"N": "1"}, {"S": '{"by":1}'}])
def test_an_attribute_that_cannot_be_read_is_a_pause(value):
    """Somebody wanted one. A resume removes it."""
    world = busy()
    world.coordinator.plant(world.coordinator.rows()["Migration3.0"] | {"kclpPause": value})
    assert "unknown operator" in world.coordinator.read_control().pause.sentence
    before = len(world.of(LeaseMoved))
    world.crash("w-1")
    leader = world.make_leader("sensor")
    for _ in range(30):
        leader.run_once()
        world.clock.advance(1)
    assert len(world.of(LeaseMoved)) == before
    Pausing(world.app).resume()
    assert world.coordinator.read_control().pause is None
