"""An output that cannot be written ends a worker at its start; one that is away now does not."""

from __future__ import annotations

import pytest

from kcl_pipeline.errors import SinkError, TableMismatchError
from kcl_pipeline.events import AwsTrouble, WorkerStarted
from kcl_pipeline.testing.sink import InMemorySink
from tests.support.worker_world import World


class CheckedWorld(World):
    """Its sink can check its output."""

    error: Exception | None = None

    def make_sink(self):
        world = self

        class Checked(InMemorySink):
            def check(self):
                if world.error is not None:
                    raise world.error

        return Checked(self.table, clock=self.clock)


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_read():
    world = CheckedWorld(shards=1)
    world.put(b"a")
    world.error = TableMismatchError("t has the table features clustering")
    worker = world.make_worker("w-2")
    with pytest.raises(TableMismatchError, match="clustering"):
        worker.run(world.clock.signal())
    assert "w-2" not in [event.worker_id for event in world.of(WorkerStarted)]
    assert "w-2" not in world.rows.rows()


def test_an_output_that_is_away_is_tried_later():
    world = CheckedWorld(shards=1)
    world.put(b"a")
    world.error = SinkError("no answer")
    world.worker = world.make_worker("w-2")
    world.worker.start_up()
    assert ("check of the output", "no answer") in [
        (event.operation, event.error) for event in world.of(AwsTrouble)
    ]
    world.run(15)
    assert world.data() == [b"a"]
