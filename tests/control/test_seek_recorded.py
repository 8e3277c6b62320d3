"""A seek of an application whose record, and no setting, says that the table stores positions."""

from __future__ import annotations

from collections import Counter

from kcl_pipeline.testing.sink import InMemorySink
from tests.control.test_seek import batch, counts, sought
from tests.support.operator_world import OperatorWorld


class RecordedWorld(OperatorWorld):
    sink_address = "delta:/lake/rows"


def read_once(**settings):
    world = RecordedWorld(shards=2, **settings)
    values = batch(world, "a")
    world.work(20)
    return world, values


def test_each_record_lands_once_more():
    world, values = read_once()
    assert world.settings.batch.commit_protocol is None
    done = sought(world, to="TRIM_HORIZON")
    assert (len(done.written), done.refused) == (2, ())
    world.start("w-2")
    world.work_until(lambda: counts(world) == Counter(values * 2))
    late = batch(world, "late")
    world.work(10)
    assert counts(world) == Counter(values * 2 + late)


def test_marks_of_rows_count_if_the_record_is_lost():
    """The tables were restored without the record, or an older version wrote it."""
    world, values = read_once()
    record = world.coordinator.read_application()
    text = record.text.replace("positions:", "")
    item = world.coordinator.rows()["Migration3.0"]
    world.coordinator.plant({**item, "kclpApplication": {"S": text}})
    assert not world.coordinator.read_application().identity.positions
    sought(world, to="TRIM_HORIZON")
    sink = InMemorySink(world.table, clock=world.clock)
    (first, *_) = world.leases.rows()
    (name, *_) = [one for one in world.table._positions if first in one]
    (versions,) = sink.txn_versions([f"{first} {name}"]).values()
    assert versions.position is None, "the seek has removed it"
    use = world.settings.batch.model_copy(update={"commit_protocol": "positions"})
    world.settings = world.settings.model_copy(update={"batch": use})
    world.start("w-2")
    world.work_until(lambda: counts(world) == Counter(values * 2))
    world.work(10)
    assert counts(world) == Counter(values * 2)
