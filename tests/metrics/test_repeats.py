"""The same trouble is logged once per minute."""

from __future__ import annotations

import logging

import pytest

from kcl_pipeline import events as ev
from kcl_pipeline.errors import AccessDeniedError
from kcl_pipeline.metrics.exporters import LoggingEvents
from kcl_pipeline.metrics.repeats import MAX_REMEMBERED, RepeatFilter
from kcl_pipeline.orchestration.worker_op import RunEvents
from kcl_pipeline.testing.clock import VirtualClock
from tests.support.worker_world import World, numbered


def test_one_error_passes_once_per_minute_with_its_count() -> None:
    clock = VirtualClock()
    repeats = RepeatFilter(clock)
    passed = []
    for number in range(150):
        error = f"UpdateItem on table app: shardId-{number:012d} is not there"
        passed.append(repeats(ev.AwsTrouble(f"renewal of shardId-{number}", error)))
        clock.advance(1.0)
    told = [(number, event) for number, event in enumerate(passed) if event is not None]
    assert [number for number, _ in told] == [0, 60, 120]
    assert [event.error.partition(" is not there")[2] for _, event in told] == [
        "",
        " (59 more times in the last 60 s)",
        " (59 more times in the last 60 s)",
    ]


def test_other_errors_and_other_events_pass() -> None:
    repeats = RepeatFilter(VirtualClock())
    batch = ev.BatchRefused("w", "b", ("s",), "overtaken")
    assert [repeats(event) is event for event in (batch, batch)] == [True, True]
    assert repeats(ev.AwsTrouble("a", "one")) is not None
    assert repeats(ev.AwsTrouble("a", "two")) is not None
    assert repeats(ev.CycleFailed("two", 1)) is not None
    assert repeats(ev.CycleFailed("two", 2)) is None


def test_what_is_remembered_is_bounded() -> None:
    repeats = RepeatFilter(VirtualClock())
    letters = ["".join(chr(97 + int(d)) for d in str(n)) for n in range(2 * MAX_REMEMBERED)]
    for error in letters:
        assert repeats(ev.AwsTrouble("a", error)) is not None
    assert repeats(ev.AwsTrouble("a", letters[-1])) is None
    assert repeats(ev.AwsTrouble("a", letters[0])) is not None, "forgotten"


def test_tables_deleted_under_a_worker_are_a_few_lines_per_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They were a warning a second, while a worker may not create them again."""
    caplog.set_level(logging.INFO, logger="kcl_pipeline.events")
    world = World(shards=8, buffered=True)
    world.put(*numbered(40))
    world.run(10)

    def denied():
        raise AccessDeniedError("dynamodb:CreateTable is missing", operation="CreateTable")

    for table in (world.leases, world.rows, world.coordinator):
        table.store._state["exists"] = False
        table.ensure_exists = denied
    begin = len(world.events)
    world.run(180)
    troubles = [
        event for event in world.events[begin:] if isinstance(event, ev.AwsTrouble | ev.CycleFailed)
    ]
    assert len(troubles) > 180, "each one is still an event, and counted"
    clock = VirtualClock()
    log, run = LoggingEvents(clock), RunEvents(process_log=lambda _: None)
    run.repeats = RepeatFilter(clock)
    for event in troubles:
        log(event)
        run(event)
        clock.advance(180 / len(troubles))
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    kinds = len({record.getMessage().partition(" (")[0] for record in warnings})
    assert len(warnings) <= 4 * kinds <= 60
    assert len(run.lines) + run.dropped == len(warnings)
