"""Counting dead letters, and marking them as replayed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from kcl_pipeline.delta.dead_letters import DeadLetterCounts, count_dead_letters, mark_replayed
from kcl_pipeline.errors import SinkError
from kcl_pipeline.worker.failures import DEAD_LETTER_SCHEMA
from tests.support.delta_tables import dead_letter_table

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
LATER = NOON + timedelta(hours=3)


def letters(*numbers: int, key: str = "s-1", at: datetime = NOON, batch: str = "b") -> pa.Table:
    rows = [
        {
            "stream": "orders",
            "shard_id": "s",
            "sequence_number": str(number),
            "sub_sequence_number": 0,
            "partition_key": "k",
            "data": b"x",
            "approximate_arrival_timestamp": at,
            "lease_key": key,
            "error": "no",
            "batch_id": batch,
            "failed_at": at,
        }
        for number in numbers
    ]
    return pa.Table.from_pylist(rows, schema=DEAD_LETTER_SCHEMA)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """Three records at noon, one an hour before, one of a lease with a quote in its key."""
    made = str(tmp_path / "dead")
    table = dead_letter_table(made)
    table.append(letters(1, 2))
    table.append(letters(3, at=NOON - timedelta(hours=1)))
    table.append(letters(4, key="o'hare", batch="b'2"))
    return made


def marked(uri: str) -> dict[str, datetime | None]:
    rows = DeltaTable(uri).to_pyarrow_table().to_pylist()
    return {row["sequence_number"]: row["replayed_at"] for row in rows}


def test_the_records_that_failed_before_a_time_are_marked_once(uri: str) -> None:
    assert mark_replayed(uri, None, failed_before=NOON, replayed_at=LATER) == 1
    assert marked(uri) == {"1": None, "2": None, "3": LATER, "4": None}
    second = LATER + timedelta(hours=1)
    assert mark_replayed(uri, None, failed_before=second, replayed_at=second) == 3
    assert marked(uri) == {"1": second, "2": second, "3": LATER, "4": second}
    assert mark_replayed(uri, None, failed_before=second, replayed_at=second) == 0


@pytest.mark.parametrize("chosen", [{"lease_key": "o'hare"}, {"batch_id": "b'2"}])
def test_only_the_chosen_records_are_marked(uri: str, chosen: dict[str, str]) -> None:
    assert mark_replayed(uri, {}, failed_before=LATER, replayed_at=LATER, **chosen) == 1
    assert [number for number, at in marked(uri).items() if at is not None] == ["4"]
    assert (
        mark_replayed(uri, {}, failed_before=LATER, replayed_at=LATER, lease_key="' OR 1=1 --") == 0
    )


def test_workers_append_after_a_mark(uri: str) -> None:
    worker = dead_letter_table(uri)
    mark_replayed(uri, None, failed_before=LATER, replayed_at=LATER)
    worker.append(letters(9, at=LATER))
    assert marked(uri)["9"] is None


def test_the_counts_say_how_many_wait_and_how_many_are_new(uri: str) -> None:
    now = (NOON + timedelta(minutes=30)).timestamp()
    assert count_dead_letters(uri, None, now) == DeadLetterCounts(4, 4, 3)
    mark_replayed(uri, None, failed_before=NOON, replayed_at=LATER)
    assert count_dead_letters(uri, None, now) == DeadLetterCounts(4, 3, 3)
    assert count_dead_letters(uri, None, LATER.timestamp()) == DeadLetterCounts(4, 3, 0)


def test_no_table_is_no_error_for_counting_alone(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "none")
    assert count_dead_letters(nowhere, None, 0.0) is None
    with pytest.raises(SinkError, match="there is no dead-letter table at"):
        mark_replayed(nowhere, None, failed_before=NOON, replayed_at=NOON)
    assert not Path(nowhere).exists()


def test_a_table_that_cannot_be_read_or_is_another_is_one_sentence(
    uri: str, tmp_path: Path
) -> None:
    other = str(tmp_path / "other")
    write_deltalake(other, pa.table({"amount": [1]}))
    for call in (
        lambda: count_dead_letters(other, None, 0.0),
        lambda: mark_replayed(other, None, failed_before=NOON, replayed_at=NOON),
    ):
        with pytest.raises(SinkError, match="is no dead-letter table: it has no column failed_at"):
            call()
    for file in Path(uri).rglob("*.parquet"):
        file.write_bytes(b"broken")
    with pytest.raises(SinkError, match="reading the dead-letter table"):
        count_dead_letters(uri, None, 0.0)
