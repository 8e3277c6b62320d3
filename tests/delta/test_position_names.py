"""Names of positions in a Delta table: long and short ones, and what tells them apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kcl_pipeline.batch import CommitEntry, DataFile, ShortNames, TxnVersions, names_of, shard_key
from kcl_pipeline.delta.commits.announcements import (
    FOLDER,
    FORMAT,
    FORMAT_OF_LONG_NAMES,
    AnnouncementError,
    Claim,
    PreparedBatch,
    decoded,
    encoded,
)
from kcl_pipeline.delta.commits.names import long_id, names, short_id
from kcl_pipeline.delta.log import delta_log
from kcl_pipeline.delta.log.delta_log import DeltaLog
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.errors import SinkError, TableMismatchError
from kcl_pipeline.position import Position
from tests.delta.test_sink import SCHEMA
from tests.support.announcing import announce
from tests.support.delta_tables import ids, log_lines, written

STREAM = "arn:aws:kinesis:us-east-1:111122223333:stream/orders/1760000000"
NONE = TxnVersions()


def key_of(shard: str, stream: str = STREAM) -> str:
    return shard_key(shard, f"{stream}/{shard}")


KEY, OTHER, THIRD = (key_of(f"shardId-{number:012d}") for number in range(3))


def base(key: str, application: str = "app") -> str:
    return long_id(application, names_of(key)[1] or "")


class Table:
    """A table and workers that prefer long or short names."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.turn = 0
        self.sink(short=False).ensure_table(SCHEMA)

    def sink(self, *, short: bool, application: str = "app") -> DeltaCommitter:
        made = DeltaCommitter(DeltaSink(self.uri), application)
        made.name_positions(short=short)
        return made

    def commit(self, sink: DeltaCommitter, *keys: str) -> TxnVersions:
        """Land one row, and move each shard to its id."""
        self.turn += 1
        found = sink.txn_versions(keys)
        entries = [CommitEntry.to(key, found[key], at(self.turn)) for key in keys]
        assert sink.commit(written(self.uri, self.turn), entries).version is not None
        return sink.txn_versions(keys)[keys[0]]

    def stored(self, key: str, *, short: bool) -> list[int | None]:
        """What the log has under the names of one scheme."""
        log = DeltaLog(self.uri)
        assert log.refresh()
        return [log.transaction(one) for one in names(base(key), short=short)]


def at(number: int) -> Position:
    return Position(str(number))


@pytest.fixture(name="table")
def table_fixture(tmp_path: Path) -> Table:
    return Table(str(tmp_path / "table"))


def test_a_short_name_is_a_hash_and_the_number_of_the_shard() -> None:
    assert names(base(OTHER), short=True) == tuple(f"QXAO-D9OUzQqaMZz.1{end}" for end in "vlmh")


def test_different_shards_streams_and_applications_have_different_names() -> None:
    shards = [
        "shardId-000000000012",
        "shardId-000000000001",
        "shardId-0000000000012",
        "shardId-12",
        "12",
        "1",
        "1v",
        "a.1",
        "shardId-00000000001a",
    ]
    streams = [STREAM, STREAM + "1", STREAM.replace("orders", "clicks"), "arn:other/17"]
    found = [
        name
        for application in ("app", "app2")
        for stream in streams
        for shard in shards
        for name in names(base(key_of(shard, stream), application), short=True)
    ]
    assert len(set(found)) == len(found) == 2 * 4 * 9 * 4
    assert not any("/" in name for name in found), "as in all other names of this package"


def test_a_commit_of_64_shards_takes_at_most_30_kb(table: Table) -> None:
    keys = [key_of(f"shardId-{number:012d}") for number in range(64)]
    sink = table.sink(short=True)
    table.commit(sink, *keys)
    found = sink.txn_versions(keys)
    entries = [CommitEntry.to(key, found[key], Position(str(49 * 10**54))) for key in keys]
    version = sink.commit(written(table.uri, 2), entries).version
    entry = Path(table.uri) / "_delta_log" / f"{version:020d}.json"
    assert entry.stat().st_size <= 30 * 1024
    assert sum("txn" in json.loads(line) for line in entry.read_text().splitlines()) == 4 * 64


def test_a_position_keeps_its_names(table: Table) -> None:
    """Whatever a later worker prefers."""
    long, short = table.sink(short=False), table.sink(short=True)
    table.commit(long, KEY)
    table.commit(short, OTHER)
    assert table.commit(short, KEY, OTHER, THIRD).number == 2
    assert table.commit(long, KEY, OTHER, THIRD).number == 3
    for key, is_short in ((KEY, False), (OTHER, True), (THIRD, True)):
        assert None not in table.stored(key, short=is_short)
        unused = table.stored(key, short=not is_short)
        assert unused == ([0, None, None, None, None] if is_short else [None] * 4)
    for sink in (table.sink(short=False), table.sink(short=True)):
        found = sink.txn_versions([KEY, OTHER, THIRD]).values()
        assert [(one.number, one.position) for one in found] == [
            (3, at(4)),
            (3, at(4)),
            (2, at(4)),
        ]
    assert ids(table.uri) == [1, 2, 3, 4]


def long_names_only(table: Table, key: str) -> TxnVersions:
    """Read a position as a version does that knows no short names.

    Raises:
        ValueError: As there.
    """
    found = [one for one in table.stored(key, short=False) if one is not None]
    if not found:
        return TxnVersions()
    if len(found) != 5:
        raise ValueError(f"{len(found)} of 5 transactions of a position are there")
    return TxnVersions(number=found[0], position=at(found[1]))


def test_a_version_that_knows_only_long_names_refuses_short_ones(table: Table) -> None:
    assert long_names_only(table, KEY) == NONE
    table.commit(table.sink(short=True), KEY)
    with pytest.raises(ValueError, match="1 of 5"):
        long_names_only(table, KEY)
    table.sink(short=True).use_long_names()
    assert long_names_only(table, KEY) == TxnVersions(number=1, position=at(1))


@pytest.mark.parametrize("first", [True, False])
def test_of_two_first_commits_with_different_names_the_second_is_refused(
    table: Table, first: bool
) -> None:
    one, other = table.sink(short=first), table.sink(short=not first)
    mine, later = (CommitEntry.to(KEY, NONE, at(end)) for end in (1, 2))
    assert one.txn_versions([KEY]) == other.txn_versions([KEY]) == {KEY: NONE}
    assert one.commit(written(table.uri, 1), [mine]).version is not None
    assert other.commit(written(table.uri, 1, 2), [later]).refused == (KEY,)
    assert other.move(KEY, NONE, at(2), ended=False) is None
    assert table.commit(other, KEY).number == 2
    assert table.stored(KEY, short=not first)[1:] == [None] * (3 if not first else 4)


def test_a_moved_position_keeps_its_names(table: Table) -> None:
    table.commit(table.sink(short=True), KEY)
    sink = table.sink(short=False)
    moved = sink.move(KEY, sink.txn_versions([KEY])[KEY], None, ended=True)
    assert moved is not None
    assert table.sink(short=True).txn_versions([KEY])[KEY] == moved
    assert table.stored(KEY, short=False) == [0, None, None, None, None]
    assert sink.move(OTHER, NONE, at(5), ended=False) is not None
    assert table.stored(OTHER, short=True) == [None] * 4


def announced_claim(sink: DeltaCommitter, key: str, end: int) -> Claim:
    entry = CommitEntry.to(key, sink.txn_versions([key])[key], at(end))
    return sink._claim(entry)


@pytest.mark.parametrize("short", [True, False])
def test_announcements_with_short_names_have_another_format(table: Table, short: bool) -> None:
    """Other applications of older versions may write the same table, and commit what they find."""
    name = f"{FOLDER}/{'0' * 32}.json"
    mixed = announced_claim(table.sink(short=False), OTHER, 5)
    claims = (announced_claim(table.sink(short=short), KEY, 5), mixed)
    batch = PreparedBatch((), claims, "digest", name)
    data = encoded(batch)
    assert json.loads(data)["format"] == (4 if short else 3)
    assert decoded(data, name) == batch
    assert ('"isShort"' in data.decode()) == short, "an unknown field is refused"


def test_format_3_has_no_short_names(table: Table) -> None:
    name = f"{FOLDER}/{'0' * 32}.json"
    data = encoded(PreparedBatch((), (announced_claim(table.sink(short=True), KEY, 5),), "d", name))
    former = data.replace(b'"format":%d' % FORMAT, b'"format":%d' % FORMAT_OF_LONG_NAMES)
    assert former != data
    with pytest.raises(AnnouncementError, match="no short names"):
        decoded(former, name)


def test_an_announced_batch_does_not_land_under_former_names(table: Table) -> None:
    """Its position has got the names of the other scheme since."""
    sink = table.sink(short=True)
    table.commit(sink, KEY)
    waiting = announce(sink, written(table.uri, 7).files, announced_claim(sink, KEY, 7))
    assert waiting.name
    sink.use_long_names()
    table.sink(short=False).fence(OTHER, NONE)
    assert table.commit(table.sink(short=True), KEY).number == 2
    assert ids(table.uri) == [1, 2]


def test_an_announced_first_batch_lands_with_its_marker(table: Table) -> None:
    sink, taker = table.sink(short=True), table.sink(short=False)
    announce(sink, written(table.uri, 7).files, announced_claim(sink, KEY, 7))
    assert taker.move(KEY, NONE, at(9), ended=False) is None, "the announced batch lands first"
    assert taker.txn_versions([KEY])[KEY].position == at(7)
    assert table.stored(KEY, short=False) == [0, None, None, None, None]


class Overtaken:
    """Before the first entry is written, somebody else does something."""

    def __init__(self, sink: DeltaCommitter, event: Callable[[], object]) -> None:
        self.append = sink._log.append
        self.event: Callable[[], object] | None = event
        sink._log.append = self  # type: ignore[method-assign]

    def __call__(self, files: Sequence[DataFile], transactions: dict[str, int]) -> None:
        event, self.event = self.event, None
        if event is not None:
            event()
        self.append(files, transactions)


def test_a_commit_whose_position_gets_other_names_meanwhile_is_refused(table: Table) -> None:
    """Else its position would be written where nobody looks for it."""
    sink = table.sink(short=True)
    before = table.commit(sink, KEY)
    Overtaken(sink, table.sink(short=False).use_long_names)
    outcome = sink.commit(written(table.uri, 2), [CommitEntry.to(KEY, before, at(2))])
    assert outcome.refused == (KEY,)
    after = table.sink(short=True).txn_versions([KEY])[KEY]
    assert after == before
    assert sink.commit(written(table.uri, 2), [CommitEntry.to(KEY, after, at(2))]).version
    assert table.sink(short=False).txn_versions([KEY])[KEY].position == at(2)
    assert ids(table.uri) == [1, 2]


def test_a_move_whose_position_gets_other_names_meanwhile_is_written_there(table: Table) -> None:
    sink = table.sink(short=True)
    before = table.commit(sink, KEY)
    Overtaken(sink, table.sink(short=False).use_long_names)
    assert sink.move(KEY, before, at(9), ended=False) is not None
    assert table.sink(short=True).txn_versions([KEY])[KEY].position == at(9)


def test_names_that_become_long_are_those_of_one_application(table: Table) -> None:
    sink, other = table.sink(short=True), table.sink(short=True, application="other")
    found = [table.commit(one, KEY, OTHER) for one in (sink, other)]
    ended = sink.move(OTHER, sink.txn_versions([OTHER])[OTHER], None, ended=True)
    lines = len(log_lines(table.uri))
    sink.use_long_names()
    assert sink.txn_versions([KEY, OTHER]) == {KEY: found[0], OTHER: ended}
    assert other.txn_versions([KEY])[KEY] == found[1]
    assert len(log_lines(table.uri)) == lines + 1 + 2 * 5
    assert None not in table.stored(KEY, short=False)
    stored = DeltaLog(table.uri)
    assert stored.refresh()
    assert stored.transaction(f"{base(KEY, 'other')}/v") == 0
    sink.use_long_names()
    assert len(log_lines(table.uri)) == lines + 1 + 2 * 5, "there is nothing to write any more"
    assert table.commit(table.sink(short=True), KEY).number == 2
    assert table.commit(other, KEY).number == 2


def test_names_become_long_also_while_others_write(table: Table) -> None:
    sink = table.sink(short=True)
    table.commit(sink, KEY)
    mine = table.sink(short=True)
    Overtaken(mine, lambda: table.commit(sink, KEY, OTHER))
    mine.use_long_names()
    assert None not in table.stored(KEY, short=False)
    assert None not in table.stored(OTHER, short=False)
    found = table.sink(short=True).txn_versions([KEY, OTHER])
    assert [(one.number, one.position) for one in found.values()] == [(2, at(2)), (1, at(2))]


def test_a_table_with_long_names_alone_keeps_them(table: Table) -> None:
    sink = table.sink(short=False)
    assert isinstance(sink, ShortNames)
    assert sink.prefers_short_names()
    table.commit(table.sink(short=False, application="app2"), KEY)
    assert sink.commit(written(table.uri, 9), [CommitEntry("x", 1, NONE)]).version
    assert sink.prefers_short_names(), "there is no position of this application"
    table.commit(sink, KEY)
    assert not sink.prefers_short_names()
    table.commit(table.sink(short=True), OTHER)
    assert table.sink(short=False).prefers_short_names(), "older versions are excluded already"
    assert not table.sink(short=False, application="app2").prefers_short_names()
    sink.use_long_names()
    assert not sink.prefers_short_names()


def test_without_a_table_there_are_short_names(tmp_path: Path) -> None:
    sink = DeltaCommitter(DeltaSink(str(tmp_path / "none")), "app")
    assert sink.prefers_short_names()
    sink.use_long_names()
    assert not (tmp_path / "none").exists()


def test_names_that_cannot_be_listed_stay_as_they_are(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.commit(table.sink(short=True), KEY)
    monkeypatch.setattr(delta_log, "read_transactions", lambda *_: None)
    sink = table.sink(short=False)
    assert not sink.prefers_short_names()
    with pytest.raises(SinkError, match="cannot be listed"):
        sink.use_long_names()
    assert sink.txn_versions([KEY])[KEY].position == at(1)
    assert table.commit(sink, KEY).number == 2


def test_an_incomplete_position_does_not_become_long(table: Table) -> None:
    log = DeltaLog(table.uri)
    assert log.refresh()
    log.append((), {f"{base(KEY)}/v": 0, f"{short_id(base(KEY))}v": 1 << 28})
    with pytest.raises(TableMismatchError, match="1 of 4"):
        table.sink(short=True).use_long_names()
