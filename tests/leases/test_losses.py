"""The record of lost records: what it has, how it is bounded and acknowledged (both tables)."""

from __future__ import annotations

import pytest

from kcl_pipeline.errors import UnavailableError, UnreadableRowError
from kcl_pipeline.events import LossReason, RecordsLost
from kcl_pipeline.leases.application.losses import (
    MAX_LOSSES,
    MAX_TEXT,
    Loss,
    LossLog,
    losses_from_text,
    losses_text,
    time_text,
)
from kcl_pipeline.leases.migration import ensure_client_version
from kcl_pipeline.position import Position

# fixtures
from tests.support.lease_tables import aws_fixture, client_fixture, tables_fixture  # noqa: F401


def lost(number: int = 1, *, before: str | None = None, at: int = 1_000) -> Loss:
    event = RecordsLost(
        "w-1",
        f"123456789012:orders:9:shardId-{number}",
        LossReason.LEFT_RETENTION,
        Position("7", 2),
        first_arrival_millis=5,
        last_arrival_millis=6,
        stream="orders",
        before=None if before is None else Position(before),
    )
    return Loss.of(event, at)


@pytest.fixture(name="started")
def started_fixture(tables):
    ensure_client_version(tables.coordinator, "w1", tables.clock)
    return tables


def test_a_loss_is_an_attribute_of_the_client_version_row(started):
    table = started.coordinator
    before = started.rows(table)["Migration3.0"]
    assert table.read_losses().log == LossLog()
    table.change_losses(lambda log: log.with_losses([lost()]))
    (found,) = table.read_losses().log.losses
    assert found == lost()
    assert (found.shard_id, found.after, found.reason) == ("shardId-1", "7/2", "left_retention")
    row = started.rows(table)["Migration3.0"]
    assert row.pop("kclpLosses")
    assert row == before, "what a Java reader reads is untouched"
    assert list(started.rows(table)) == ["Migration3.0"], "no row that Java would move"


def test_a_write_between_read_and_write_is_kept(started):
    table, others = started.coordinator, [[lost(2)]]
    table.change_losses(lambda log: log.with_losses([lost(0)]))

    def change(log):
        if others:
            new = others.pop()
            table.change_losses(lambda other: other.with_losses(new))
        return log.with_losses([lost(1)])

    table.change_losses(change)
    found = [loss.shard_id for loss in table.read_losses().log.losses]
    assert found == ["shardId-0", "shardId-2", "shardId-1"]


def test_without_the_row_nothing_is_written(tables):
    with pytest.raises(UnavailableError, match="is missing"):
        tables.coordinator.change_losses(lambda log: log.with_losses([lost()]))
    assert tables.rows(tables.coordinator) == {}


@pytest.mark.parametrize("value", ["", "[]", '{"unlisted": -1}', "x" * (MAX_TEXT + 1)])
def test_a_record_that_cannot_be_read_is_one_sentence(value):
    with pytest.raises(UnreadableRowError, match="kclpLosses"):
        losses_from_text(value)


def test_a_repeated_report_changes_nothing_and_a_larger_loss_is_open_again():
    log = LossLog().with_losses([lost(before="9")])
    assert log.with_losses([lost(before="9", at=5_000)]) == log
    seen = log.with_acknowledged(log, 2_000)
    assert (seen.unacknowledged, seen.acknowledged, seen.acknowledged_millis) == (0, 1, 2_000)
    assert seen.with_losses([lost(before="9", at=5_000)]) == seen
    larger = seen.with_losses([lost(before="12", at=5_000)])
    assert [loss.before for loss in larger.losses] == ["12"]
    assert larger.unacknowledged == 1


def test_what_came_after_the_look_stays_unacknowledged():
    shown = LossLog().with_losses([lost(1)])
    now = shown.with_losses([lost(2)]).with_acknowledged(shown, 2_000)
    assert [loss.shard_id for loss in now.waiting] == ["shardId-2"]
    assert now.acknowledged == 1
    assert now.with_acknowledged(shown, 3_000) == now


def test_the_newest_are_listed_and_the_others_counted_until_they_are_acknowledged():
    log = LossLog().with_losses([lost(n) for n in range(MAX_LOSSES + 7)])
    assert (len(log.losses), log.unlisted, log.unacknowledged) == (MAX_LOSSES, 7, MAX_LOSSES + 7)
    assert log.losses[-1].shard_id == f"shardId-{MAX_LOSSES + 6}"
    later = log.with_losses([lost(100), lost(101)])
    seen = later.with_acknowledged(log, 2_000)
    assert (seen.unlisted, [x.shard_id for x in seen.waiting]) == (
        0,
        ["shardId-100", "shardId-101"],
    )
    assert seen.acknowledged == MAX_LOSSES + 7
    more = seen.with_losses([lost(n) for n in range(200, 240)])
    assert more.unlisted == 0, "acknowledged ones are removed first"
    assert more.unacknowledged == 42


def test_long_names_do_not_fill_the_row():
    event = RecordsLost('"' * 5_000, '"' * 5_000, LossReason.ROW_DELETED, stream="\n" * 9_000)
    log = LossLog()
    for number in range(30):
        log = log.with_losses([Loss.of(event, number), lost(number)])
    log = log.with_losses(
        [Loss.of(RecordsLost("w", '"' * 2_000 + str(n), event.reason), 1) for n in range(30)]
    )
    assert len(losses_text(log)) <= MAX_TEXT
    assert log.unlisted
    assert losses_from_text(losses_text(log)).log == log


def test_times_outside_the_calendar_are_shown_as_they_are():
    assert time_text(None) == ""
    assert time_text(0) == "1970-01-01T00:00:00+00:00"
    assert time_text(2**63 - 1) == f"{2**63 - 1} ms"
