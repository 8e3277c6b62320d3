"""Batches of dead letters alone, before any columns are known: the position moves in the table."""

from __future__ import annotations

from dataclasses import replace

from kcl_pipeline.position import Position
from kcl_pipeline.testing.sink import SinkFault
from tests.support.commit_world import NO_RECORDS
from tests.worker.test_commit import KEY, World, world_fixture  # noqa: F401 (a fixture)


def test_a_batch_of_dead_letters_moves_the_position_before_columns_are_known(world: World) -> None:
    """Without it, a worker that takes the deleted and created row at LATEST loses the rest."""
    world.sink.ensure(NO_RECORDS.schema)
    for through in (5, 7):
        batch = world.batch(through)
        assert world.steps.run(replace(batch, files=()), world.consumers) is not None
        assert world.stored().position == Position(str(through))
        assert world.consumers[KEY].stored == world.stored()
    assert world.commit(9) is not None
    assert world.stored().position == Position("9")
    assert world.writes == []


def test_a_batch_of_dead_letters_needs_no_table(world: World) -> None:
    assert world.steps.run(replace(world.batch(5), files=()), world.consumers) is not None
    assert world.rows.version < 0
    assert world.commit(7) is not None
    assert world.stored().position == Position("7")


def test_a_batch_of_dead_letters_is_refused_after_another_worker(world: World) -> None:
    world.sink.ensure(NO_RECORDS.schema)
    world.rival(KEY, Position("6"))
    done = world.steps.run(replace(world.batch(5), files=()), world.consumers)
    assert done is None or KEY not in done.lease_keys
    assert world.stored().position == Position("6")


def test_a_lost_answer_of_a_batch_of_dead_letters_is_recognised(world: World) -> None:
    world.sink.ensure(NO_RECORDS.schema)
    faults = [SinkFault.LAND_AND_FAIL]
    world.sink.faults = lambda op, _keys: faults.pop() if op == "commit" and faults else None
    assert world.steps.run(replace(world.batch(5), files=()), world.consumers) is not None
    assert world.consumers[KEY].stored == world.stored()
    assert world.stored().position == Position("5")
