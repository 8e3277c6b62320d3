"""Positions as application transactions of a Delta table, and as announcements."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.delta.log import DeltaLog
from kcl_pipeline.delta.sink import position_transactions, stored_position, transaction_names
from kcl_pipeline.errors import SinkError, TableMismatchError
from kcl_pipeline.position import NOTHING_STORED, TRIM_HORIZON, Position, StoredPosition
from kcl_pipeline.sinks.announcements import FOLDER, AnnouncedBatch, decoded, encoded
from tests.delta.test_sink_behaviour import KEY, OTHER, SCHEMA
from tests.support.delta_tables import committer

FULL = f"app/{KEY}"
NAMES = transaction_names(FULL)
ONE = 1 << 28
NAME = f"{FOLDER}/{'0' * 32}.json"


@given(
    st.integers(1, 2**35 - 1),
    st.integers(0, 2**186 - 1),
    st.integers(0, 2**28 - 2),
    st.booleans(),
    st.booleans(),
)
def test_a_position_survives_its_encoding(number, sequence, sub, known, ended) -> None:
    position = Position(str(sequence), sub) if known else None
    before = StoredPosition(number, position, ended)
    found = position_transactions(FULL, before)
    assert tuple(found) == NAMES
    assert all(-(2**63) <= one < 2**63 for one in found.values())
    assert stored_position(FULL, found.get) == before


def test_names_are_short_and_differ_by_application_stream_and_shard() -> None:
    other = [
        transaction_names(f"other/{KEY}"),
        transaction_names(FULL.replace("/17/", "/18/")),
        transaction_names(f"app/{OTHER}"),
        transaction_names(FULL.replace("shardId-", "shard-")),
    ]
    assert len({*NAMES, *(name for one in other for name in one)}) == 4 * (1 + len(other))
    assert all("/" not in name and len(name) < 40 for name in NAMES)


@pytest.mark.parametrize(
    ("number", "position", "bits"),
    [
        (1, Position(str(2**186)), 186),
        (1, Position("5", 2**28 - 1), 28),
        (2**35, Position("5"), 35),
    ],
)
def test_a_value_that_does_not_fit_is_refused(number: int, position: Position, bits: int) -> None:
    with pytest.raises(SinkError, match=f"more than {bits} bits"):
        position_transactions(FULL, StoredPosition(number, position))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ((None, None, 4, None), "1 of 4"),
        ((ONE, None, None, None), "1 of 4"),
        ((ONE, 2, None, 4), "3 of 4"),
        ((ONE - 1, 0, 0, 0), "outside their limits"),
        ((-ONE, 0, 0, 0), "outside their limits"),
        ((ONE, 2**62, 0, 0), "outside their limits"),
        ((ONE, 0, 0, -1), "outside their limits"),
    ],
)
def test_a_position_that_another_program_changed_stops_its_shard(
    tmp_path: Path, values: tuple[int | None, ...], reason: str
) -> None:
    uri = str(tmp_path / "table")
    sink = committer(uri)
    sink.ensure(SCHEMA)
    log = DeltaLog(uri)
    assert log.refresh()
    pairs = zip(NAMES, values, strict=True)
    log.append((), {name: one for name, one in pairs if one is not None})
    with pytest.raises(TableMismatchError, match=reason):
        sink.positions([KEY])
    assert sink.positions([OTHER]).shards[OTHER] == NOTHING_STORED


def test_the_sentinels_are_never_stored() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        position_transactions(FULL, StoredPosition(1, TRIM_HORIZON))


def batch(expected: StoredPosition) -> AnnouncedBatch:
    return AnnouncedBatch(
        NAME, "form", "id", (), {FULL: expected}, {FULL: expected.moved(Position("9"))}
    )


def test_an_announcement_keeps_the_positions_of_its_batch() -> None:
    for expected in (NOTHING_STORED, StoredPosition(7, Position("3", 1)), StoredPosition(2, None)):
        one = batch(expected)
        assert decoded(encoded(one), NAME) == one


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"number":8', b'"number":7'),
        (b'"number":8', b'"number":9'),
        (b'"number":8', b'"number":-8'),
        (b'"sequenceNumber":"9"', b'"sequenceNumber":"LATEST"'),
        (b'"key":"app/', b'"unknown":"app/'),
    ],
)
def test_an_announced_position_that_does_not_follow_is_refused(old: bytes, new: bytes) -> None:
    data = encoded(batch(StoredPosition(7, Position("3"))))
    assert old in data
    with pytest.raises(ValueError, match=r"it is malformed|a position does not follow"):
        decoded(data.replace(old, new), NAME)
