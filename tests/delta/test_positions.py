"""Positions in the log of a sink, run against the Delta table and its version in memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.batch import (
    CommitEntry,
    PositionStore,
    TransactionalSink,
    TxnVersions,
    names_of,
    shard_key,
)
from kcl_pipeline.delta.commits.announcements import FOLDER, Claim, PreparedBatch, decoded, encoded
from kcl_pipeline.delta.commits.names import long_id, names, short_id
from kcl_pipeline.delta.commits.positions import decoded as position_of
from kcl_pipeline.delta.commits.positions import encoded as numbers_of
from kcl_pipeline.delta.log.delta_log import DeltaLog
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.errors import SinkError, TableMismatchError
from kcl_pipeline.position import TRIM_HORIZON, Position
from tests.delta.test_sink_behaviour import (
    SCHEMA,
    World,
    landed,
    world_fixture,  # noqa: F401 (a fixture)
)

KEY = shard_key("a", "arn:aws:kinesis:eu-west-1:1:stream/s/17/a")
OTHER = shard_key("b", "arn:aws:kinesis:eu-west-1:1:stream/s/17/b")
NONE = TxnVersions()
BASE = long_id("app", names_of(KEY)[1] or "")
SHORT_BASE = short_id(BASE)


def at(text: str, sub: int = 0) -> Position:
    return Position(text, sub)


def store(sink: TransactionalSink) -> PositionStore:
    assert isinstance(sink, PositionStore)
    return sink


def test_a_commit_stores_the_position_of_every_shard_with_its_rows(world: World) -> None:
    sink = world.ready()
    entries = [CommitEntry.to(KEY, NONE, at("5", 3)), CommitEntry.to(OTHER, NONE, at("9" * 55))]
    assert landed(sink.commit(world.write(1, 2), entries))
    found = world.new_sink().txn_versions([KEY, OTHER])
    assert found == {
        KEY: TxnVersions(None, 1, 1, at("5", 3)),
        OTHER: TxnVersions(None, 1, 1, at("9" * 55)),
    }
    assert landed(sink.commit(world.write(3), [CommitEntry.to(KEY, found[KEY], at("7"))]))
    assert world.new_sink().txn_versions([KEY])[KEY] == TxnVersions(None, 1, 2, at("7"))
    assert world.ids() == [1, 2, 3]


def test_of_two_writers_that_expect_the_same_number_the_second_is_refused(world: World) -> None:
    first, second = world.ready(), world.new_sink()
    entry = CommitEntry.to(KEY, NONE, at("5"))
    assert landed(first.commit(world.write(1), [entry]))
    refused = second.commit(world.write(1, 2), [CommitEntry.to(KEY, NONE, at("6"))])
    assert refused.refused == (KEY,)
    mixed = [CommitEntry.to(OTHER, NONE, at("1")), CommitEntry.to(KEY, NONE, at("8"))]
    assert second.commit(world.write(3), mixed).refused == (KEY,)
    assert world.new_sink().txn_versions([OTHER])[OTHER] == NONE, "all shards or none"
    assert world.ids() == [1]


def test_a_repeated_commit_is_found_landed_also_after_later_ones(world: World) -> None:
    sink, other = world.ready(), world.new_sink()
    batch, entry = world.write(1), CommitEntry.to(KEY, NONE, at("5"))
    version = sink.commit(batch, [entry]).version
    assert other.commit(batch, [entry]).version == version
    now = other.txn_versions([KEY])[KEY]
    assert landed(other.commit(world.write(2), [CommitEntry.to(KEY, now, at("6"))]))
    assert sink.commit(batch, [entry]).version == version
    assert world.ids() == [1, 2]


def test_a_batch_without_files_moves_the_position(world: World) -> None:
    sink = world.ready()
    assert landed(sink.commit(world.write(), [CommitEntry.to(KEY, NONE, at("5"))]))
    assert sink.txn_versions([KEY])[KEY].position == at("5")
    assert world.ids() == []


def test_a_moved_position_refuses_the_paused_writer_behind_it(world: World) -> None:
    paused, taker = world.ready(), world.new_sink()
    moved = store(taker).move(KEY, NONE, at("8"), ended=False)
    assert moved == TxnVersions(None, 1, 1, at("8"))
    assert store(taker).move(KEY, NONE, at("9"), ended=False) is None
    assert not landed(paused.commit(world.write(1), [CommitEntry.to(KEY, NONE, at("5"))]))
    ended = store(taker).move(KEY, moved, at("8"), ended=True)
    assert ended == TxnVersions(None, 1, 2, at("8"), ended=True)
    assert world.new_sink().txn_versions([KEY])[KEY] == ended
    assert world.ids() == []


def test_a_shard_without_records_can_end(world: World) -> None:
    ended = store(world.ready()).move(KEY, NONE, None, ended=True)
    assert ended == TxnVersions(None, 1, 1, None, ended=True)
    assert world.new_sink().txn_versions([KEY])[KEY] == ended


def test_without_a_table_there_is_no_position_to_move(world: World) -> None:
    assert store(world.new_sink()).move(KEY, NONE, at("5"), ended=False) == NONE


def test_the_two_protocols_refuse_each_others_commits(world: World) -> None:
    """The first position raises the fence, because older writers compare data and fence only."""
    sink, two_phase = world.ready(), world.new_sink()
    assert landed(sink.commit(world.write(1), [CommitEntry("a", 5, NONE)]))
    seen = sink.txn_versions([KEY])[KEY]
    assert seen == TxnVersions(5)
    prepared = CommitEntry("a", 6, TxnVersions(5))
    assert landed(sink.commit(world.write(2), [CommitEntry.to(KEY, seen, at("7"))]))
    assert two_phase.commit(world.write(2), [prepared]).refused == ("a",)
    late = sink.txn_versions([KEY])[KEY]
    assert landed(
        two_phase.commit(world.write(3), [CommitEntry("a", 6, TxnVersions(5, late.fence))])
    )
    assert not landed(sink.commit(world.write(3), [CommitEntry.to(KEY, late, at("8"))]))
    assert world.ids() == [1, 2, 3]


@pytest.mark.parametrize("order", sorted(set(itertools.permutations("oott"))), ids="".join)
def test_a_takeover_at_any_moment_lands_each_record_once(
    world: World, order: tuple[str, ...]
) -> None:
    """The old owner commits record 1, twice; the taker reads, then commits what is not there."""
    old, taker = world.ready(), world.new_sink()
    batch, entry = world.write(1), CommitEntry.to(KEY, NONE, at("1"))
    seen: TxnVersions | None = None
    for step in order:
        if step == "o":
            old.commit(batch, [entry])
        elif seen is None:
            seen = taker.txn_versions([KEY])[KEY]
        else:
            rows = (2,) if seen.position == at("1") else (1, 2)
            result = taker.commit(world.write(*rows), [CommitEntry.to(KEY, seen, at("2"))])
            if not landed(result):
                seen = taker.txn_versions([KEY])[KEY]
                again = world.write(2)
                assert landed(taker.commit(again, [CommitEntry.to(KEY, seen, at("2"))]))
    assert world.ids() == [1, 2]


@given(
    st.integers(1, 2**35 - 1),
    st.integers(0, 2**186 - 1),
    st.integers(0, 2**28 - 2),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_position_survives_its_encoding(number, sequence, sub, known, ended, short) -> None:
    position = Position(str(sequence), sub) if known else None
    versions = TxnVersions(3, 4, number, position, ended)
    numbers = numbers_of(versions, short=short)
    assert len(numbers) == (4 if short else 5)
    assert all(-(2**63) <= one < 2**63 for one in numbers)
    assert position_of(3, 4, numbers, short=short) == versions


@given(st.integers(1, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_long_names_hold_every_number(number, sub) -> None:
    versions = TxnVersions(3, 4, number, Position("5", sub))
    assert position_of(3, 4, numbers_of(versions, short=False), short=False) == versions


@pytest.mark.parametrize("short", [True, False])
def test_a_sequence_number_that_does_not_fit_is_refused(short: bool) -> None:
    with pytest.raises(SinkError, match="186 bits"):
        numbers_of(TxnVersions(number=1, position=at(str(2**186))), short=short)


@pytest.mark.parametrize(("number", "sub"), [(1, 2**28 - 1), (2**35, 0)])
def test_a_number_that_does_not_fit_a_short_name_is_refused(number: int, sub: int) -> None:
    with pytest.raises(SinkError, match=r"more than (28|35) bits"):
        numbers_of(TxnVersions(number=number, position=at("5", sub)), short=True)


ONE = 1 << 28


@pytest.mark.parametrize(
    "values",
    [
        (1, 2, None, 4, 5),
        (0, 0, 0, 0, 0),
        (1, 2**62, 0, 0, 0),
        (1, 0, 0, -1, 0),
        (1, 0, 0, 0, -2),
        (ONE, 2, None, 4),
        (ONE - 1, 0, 0, 0),
        (-ONE, 0, 0, 0),
        (ONE, 2**62, 0, 0),
        (ONE, 0, 0, -1),
    ],
)
def test_a_position_that_another_program_changed_is_refused(values) -> None:
    with pytest.raises(ValueError, match="position"):
        position_of(None, None, values, short=len(values) == 4)


PARTS = [
    ({f"{BASE}/v": 4}, "1 of 5"),
    ({f"{BASE}/p0": 4, f"{BASE}/p1": 4, f"{BASE}/p2": 4, f"{BASE}/s": 4}, "4 of 5"),
    ({f"{SHORT_BASE}m": 4}, "1 of 4"),
    ({f"{SHORT_BASE}v": ONE, f"{BASE}/v": 0}, "1 of 4"),
    ({f"{BASE}/v": 0}, "the marker of short names"),
    (dict.fromkeys((f"{SHORT_BASE}{one}" for one in "vlmh"), ONE), "the marker of short names"),
]


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize(("transactions", "reason"), PARTS)
def test_a_partial_position_in_the_log_stops_the_shard(
    tmp_path: Path, transactions: dict[str, int], reason: str, short: bool
) -> None:
    uri = str(tmp_path / "table")
    sink = DeltaCommitter(DeltaSink(uri), "app")
    sink.name_positions(short=short)
    sink.ensure_table(SCHEMA)
    log = DeltaLog(uri)
    assert log.refresh()
    log.append((), transactions)
    with pytest.raises(TableMismatchError, match=reason):
        sink.txn_versions([KEY])
    assert sink.txn_versions([OTHER])[OTHER] == NONE


def claim(key: str, expected: TxnVersions, end: str, *, short: bool = False) -> Claim:
    entry = CommitEntry.to(key, expected, at(end))
    return Claim.of(entry, "app", lambda _: None, prefer_short=short)


@pytest.mark.parametrize("short", [True, False])
def test_an_announcement_keeps_the_positions_of_its_batch(short: bool) -> None:
    first = claim(KEY, NONE, "5", short=short)
    later = claim(OTHER, TxnVersions(4, 2, 7, at("3", 1), ended=False), "9", short=short)
    name = f"{FOLDER}/{'0' * 32}.json"
    batch = PreparedBatch((), (first, later), "digest", name)
    assert decoded(encoded(batch), name) == batch
    numbers = (1, 5, 0, 0, 0) if not short else (ONE + 1, 5, 0, 0)
    assert first.transactions() == {
        "app/a/fence": 1,
        **dict(zip(names(BASE, short=short), numbers, strict=True)),
        **({f"{BASE}/v": 0} if short else {}),
    }
    assert set(later.transactions()) == set(names(f"app/{names_of(OTHER)[1]}", short=short))


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"position":[8,', b'"position":[9,'),
        (b'"number":8', b'"number":9'),
        (b'"positionId":"app/', b'"positionId":null,"unknown":"app/'),
        (b'"position":[8,9,', b'"position":[8,-9,'),
    ],
)
def test_an_announced_position_that_does_not_follow_is_refused(
    old: bytes, new: bytes, short: bool
) -> None:
    name = f"{FOLDER}/{'0' * 32}.json"
    expected = TxnVersions(4, 2, 7, at("3"))
    batch = PreparedBatch((), (claim(KEY, expected, "9", short=short),), "digest", name)
    data = encoded(batch)
    if short:
        old, new = (one.replace(b"[8,", b"[%d," % (8 * ONE + 1)) for one in (old, new))
        new = new.replace(b"[9,", b"[%d," % (9 * ONE + 1))
    assert old in data
    with pytest.raises(ValueError, match=r"it is malformed|a position|it names"):
        decoded(data.replace(old, new), name)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("number", [7, 9])
def test_an_announced_position_that_repeats_or_leaves_out_a_number_is_refused(
    number: int, short: bool
) -> None:
    """Its parts agree with each other, but not with the expected number 7."""
    name = f"{FOLDER}/{'0' * 32}.json"
    batch = PreparedBatch(
        (), (claim(KEY, TxnVersions(4, 2, 7, at("3")), "9", short=short),), "d", name
    )
    data = encoded(batch)
    before, after = (b"[%d," % (one * ONE + 1 if short else one) for one in (8, number))
    changed = data.replace(b'"number":8', b'"number":%d' % number)
    changed = changed.replace(b'"position":' + before, b'"position":' + after)
    assert data.count(b'"number":8') == data.count(b'"position":' + before) == 1
    with pytest.raises(ValueError, match="a position does not follow the expected one"):
        decoded(changed, name)


def test_an_announced_batch_lands_only_on_the_expected_position(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    author, taker = (DeltaCommitter(DeltaSink(uri), "app") for _ in range(2))
    author.ensure_table(SCHEMA)
    author._log.refresh()
    announced = author._announcements.announce(
        PreparedBatch((), (claim(KEY, NONE, "5"),)), author._log
    )
    assert announced.name
    assert taker.move(KEY, NONE, at("9"), ended=False) is None, "the announced batch lands first"
    assert taker.txn_versions([KEY])[KEY] == TxnVersions(None, 1, 1, at("5"))
    stale = author._announcements.announce(PreparedBatch((), (claim(KEY, NONE, "6"),)), author._log)
    seen = taker.txn_versions([KEY])[KEY]
    assert taker.move(KEY, seen, at("9"), ended=False) is not None
    assert stale.name
    assert taker.txn_versions([KEY])[KEY].position == at("9")


def test_the_sentinels_are_never_stored() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        numbers_of(TxnVersions(number=1, position=TRIM_HORIZON), short=True)
