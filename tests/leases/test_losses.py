"""The record of losses: what it counts, and what is acknowledged (both tables)."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest

from kcl_pipeline.errors import UnavailableError, UnreadableRowError
from kcl_pipeline.events import LossReason, RecordsLost, TableRestored
from kcl_pipeline.leases.application import LOSSES, MAX_LOSSES, Loss, Losses
from kcl_pipeline.leases.layout import ensure_client_version
from kcl_pipeline.position import Position

# fixtures
from tests.support.lease_tables import aws_fixture, client_fixture, tables_fixture  # noqa: F401

NONE = Losses()


def lost(number: int = 1, *, before: str = "9", at: int = 1_000) -> Loss:
    event = RecordsLost(
        "w-1",
        f"123456789012:orders:9:shardId-{number}",
        LossReason.LEFT_RETENTION,
        Position("7", 2),
        first_arrival_millis=5_000,
        last_arrival_millis=6_000,
        stream="orders",
        before=Position(before),
    )
    return Loss.of(event, at)


def restored(version: int, table: str = "t-1") -> Loss:
    return Loss.of(TableRestored(version, "version 12", table), 1_000)


@pytest.fixture(name="started")
def started_fixture(tables):
    ensure_client_version(tables.coordinator, "w1", tables.clock)
    return tables


def test_the_record_is_an_attribute_of_the_client_version_row(started):
    table = started.coordinator
    before = started.rows(table)["Migration3.0"]
    assert table.read_losses() == NONE
    table.change_losses(lambda losses: losses.with_losses([lost(0), lost(1)]))
    assert table.read_losses() == Losses(count=2, last=lost(1))
    assert table.read_losses().sentence == (
        "2 losses of records, 0 acknowledged; the last: 123456789012:orders:9:shardId-1 "
        "(left_retention, after 7/2, before 9, first arrival 1970-01-01T00:00:05+00:00, last "
        "arrival 1970-01-01T00:00:06+00:00), recorded 1970-01-01T00:00:01+00:00 by w-1"
    )
    row = started.rows(table)["Migration3.0"]
    assert row.pop("kclpLosses")
    assert row == before, "what a Java reader reads is untouched"
    assert list(started.rows(table)) == ["Migration3.0"], "no row that Java would move"


def test_a_write_between_read_and_write_is_kept(started):
    table, others = started.coordinator, [[lost(2)]]
    table.change_losses(lambda losses: losses.with_losses([lost(0)]))

    def change(losses):
        if others:
            new = others.pop()
            table.change_losses(lambda other: other.with_losses(new))
        return losses.with_losses([lost(1)])

    table.change_losses(change)
    assert table.read_losses() == Losses(count=3, last=lost(1))


def test_a_write_whose_answer_was_lost_counts_once(started):
    table = started.coordinator
    started.lose_answer("UpdateItem")
    with suppress(UnavailableError):  # the client of DynamoDB repeats the request itself
        table.change_losses(lambda losses: losses.with_losses([lost()]))
    assert table.change_losses(lambda losses: losses.with_losses([lost()])).count == 1


def test_without_the_row_nothing_is_written(tables):
    with pytest.raises(UnavailableError, match="is missing"):
        tables.coordinator.change_losses(lambda losses: losses.with_losses([lost()]))
    assert tables.rows(tables.coordinator) == {}


@pytest.mark.parametrize(
    "value",
    [
        *("", "[]", "x" * (MAX_LOSSES + 1), '{"count": -1}'),
        '{"count": 1}',  # without the last loss
        LOSSES.text(NONE.with_losses([lost()])).replace('"acknowledged":0', '"acknowledged":2'),
    ],
)
def test_a_record_that_cannot_be_read_is_one_sentence(value):
    with pytest.raises(UnreadableRowError, match="kclpLosses"):
        LOSSES.parsed(value)


@pytest.mark.parametrize("is_acknowledged", [False, True])
def test_a_repeated_report_counts_once_and_a_larger_loss_again_if_it_was_acknowledged(
    is_acknowledged,
):
    losses = NONE.with_losses([lost()])
    if is_acknowledged:
        losses = losses.with_acknowledged(losses, 2_000)
    assert losses.with_losses([lost(at=5_000)]) == losses
    larger = losses.with_losses([lost(before="12", at=5_000)])
    assert (larger.count, larger.unacknowledged) == (1 + is_acknowledged, 1)
    assert larger.last == lost(before="12", at=5_000)


def test_a_restore_that_was_counted_is_not_counted_again():
    losses = NONE.with_losses([restored(58), lost(), restored(61), lost()])
    losses = losses.with_acknowledged(losses, 2_000)
    assert losses.count == losses.acknowledged == 4
    assert losses.with_losses([restored(58), restored(61)]) == losses
    assert losses.with_losses([restored(62)]).unacknowledged == 1
    assert losses.with_losses([restored(58, "t-2")]).unacknowledged == 1, "another table"


@pytest.mark.parametrize(
    ("later", "acknowledged"),
    [
        ([], 2),
        ([lost(2)], 2),
        ([lost(1, before="12")], 1),  # more of the last loss
        ([lost(2), lost(1)], 2),
    ],
)
def test_the_number_that_was_shown_is_acknowledged(later, acknowledged):
    shown = NONE.with_losses([lost(0), lost(1)])
    losses = shown.with_losses(later).with_acknowledged(shown, 2_000)
    assert (losses.acknowledged, losses.acknowledged_millis) == (acknowledged, 2_000)
    assert losses.unacknowledged == (len(later) if later else 0)
    assert losses.with_acknowledged(shown, 3_000) == losses


def test_what_was_recorded_after_the_record_was_removed_is_not_acknowledged():
    shown = NONE.with_losses([lost(0), lost(1)])
    for losses in (NONE, NONE.with_losses([lost(2)])):
        assert losses.with_acknowledged(shown, 2_000) == losses


def test_the_longest_names_fit_into_the_record():
    losses = NONE
    for text, millis in itertools.product(('"' * 5_000, "\n" * 9_000, "é" * 3_000), (-1, 10**20)):
        event = RecordsLost(
            text, text, LossReason.ROW_DELETED, stream=text, first_arrival_millis=millis
        )
        restore = TableRestored(2**63 - 1, text, text)
        losses = losses.with_losses([Loss.of(restore, 1), Loss.of(event, 1)])
        losses = losses.with_acknowledged(losses, 2_000)
        assert len(LOSSES.text(losses)) <= MAX_LOSSES
        assert LOSSES.parsed(LOSSES.text(losses)) == losses
        assert losses.sentence.isprintable()
