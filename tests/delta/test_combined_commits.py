"""Combined commits: an announced batch lands once or never, by the first worker that commits, on
exactly the numbers it expects.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from kcl_pipeline.batch import Batch, DataFile
from kcl_pipeline.delta.files import ArrowBatchWriter, unique_name
from kcl_pipeline.delta.object_store import open_storage
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.delta.storage import LocalStorage
from kcl_pipeline.events import AnnouncementRejected
from kcl_pipeline.position import Position, StoredPosition
from kcl_pipeline.sinks.announcements import FOLDER, AnnouncedBatch, AnnouncementStore
from kcl_pipeline.sinks.sink import CommitOutcome, CommitPace, TableSink
from kcl_pipeline.testing.sink import MemoryLog, MemoryTable
from tests.support import announcing
from tests.support.delta_tables import (
    NONE,
    NOTHING,
    Committer,
    Entry,
    NoWait,
    at,
    commit_entries,
    entry,
    ids,
    log_lines,
    seq,
    written,
)

SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture
def uri(tmp_path: Path) -> str:
    path = str(tmp_path / "table")
    committer(path).ensure(SCHEMA)
    return path


def committer(uri: str, *, contended: bool = False, application: str = "app") -> Committer:
    sink = Committer(DeltaSink(uri), application, clock=NoWait(), rng=random.Random(7))
    if contended:
        sink._pace.lost(3)
    return sink


def announce(uri: str, ident: int, *entries: Entry, application: str = "app") -> AnnouncedBatch:
    sink = committer(uri)
    return announcing.announce(sink, written(uri, ident).files, *entries, application=application)


def announced(uri: str) -> list[str]:
    return sorted(file.name for file in (Path(uri) / FOLDER).glob("*.json"))


def commit(uri: str, ident: int, key: str = "own") -> CommitOutcome:
    """A commit of somebody who met other writers lately, on a shard of his own."""
    sink = committer(uri, contended=True)
    stored = sink.stored(key)
    return sink.land(written(uri, ident), [entry(key, stored.number + 1, stored)])


def test_who_commits_takes_along_what_is_announced(uri: str) -> None:
    announce(uri, 1, entry("a", 5), entry("b", 6))
    announce(uri, 2, entry("c", 7), application="other")
    assert commit(uri, 3).version == 1
    assert ids(uri) == [1, 2, 3]
    assert announced(uri) == []
    assert (committer(uri).stored("a"), committer(uri).stored("b")) == (at(5), at(6))
    found = committer(uri).land(written(uri, 9), [entry("a", 5), entry("b", 6)])
    assert found == CommitOutcome(1), "the owner finds it landed"
    assert ids(uri) == [1, 2, 3]


def test_alone_nothing_is_announced_or_looked_for(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnnouncementStore, "announce", lambda *_: pytest.fail("announced"))
    monkeypatch.setattr(AnnouncementStore, "piggybacked", lambda *_: pytest.fail("looked for"))
    sink = committer(uri)
    for turn in range(1, 4):
        assert sink.land(written(uri, turn), [entry("a", turn, seq(turn - 1))]).version == turn


def test_who_loses_the_race_announces_and_is_taken_along(uri: str) -> None:
    loser, winner = committer(uri), committer(uri, contended=True)
    append, raced = loser.delta_log.append, []

    def too_late(*arguments: object) -> None:
        raced.append(True)
        if len(raced) == 1:
            winner.land(written(uri, 1), [entry("w", 1)])
        append(*arguments)  # type: ignore[arg-type]

    def winner_comes(_seconds: float) -> None:
        if announced(uri):
            winner.land(written(uri, 2), [entry("w", 2, seq(1))])

    loser.delta_log.append = too_late  # type: ignore[method-assign]
    loser._clock.sleep = winner_comes  # type: ignore[method-assign]
    assert loser.land(written(uri, 3), [entry("a", 1)]) == CommitOutcome(2)
    assert raced == [True], "it tried once, the rest was done for it"
    assert ids(uri) == [1, 2, 3]
    assert announced(uri) == []


def test_an_owner_that_looks_late_does_not_commit_its_batch_again(uri: str) -> None:
    """Between its announcement and its next look the batch lands and the shard entries on."""
    owner, other = committer(uri), committer(uri, contended=True)
    owner._pace.lost(3)

    def both(_seconds: float) -> None:
        if announced(uri):
            other.land(written(uri, 2), [entry("w", 1)])
            other.land(written(uri, 3), [entry("a", 9, at(1))])

    owner._clock.sleep = both  # type: ignore[method-assign]
    owner._rng.seed(1)
    first = entry("a", 1)
    assert owner.land(written(uri, 1), [first]) == CommitOutcome(1), "the version that has it"
    assert ids(uri) == [1, 2, 3]
    assert owner.land(written(uri, 4), [entry("a", 2, first.becomes)]).refused == ("a",)
    assert owner.land(written(uri, 1), [first]).refused == ("a",)
    assert ids(uri) == [1, 2, 3]


@pytest.mark.parametrize(
    "expected", [at(5), at(4, 2), NONE, at(8), StoredPosition(1, Position("4"), ended=True)]
)
def test_only_exactly_what_is_expected_will_do(uri: str, expected: StoredPosition) -> None:
    """The table has 4, set once; a higher position is no reason to land."""
    committer(uri).land(written(uri, 1), [entry("a", 4)])
    announce(uri, 2, entry("a", 9, expected), entry("b", 9))
    assert commit(uri, 3).version is not None
    assert ids(uri) == [1, 3]
    announce(uri, 4, entry("a", 9, at(4)), entry("b", 9))
    assert commit(uri, 5).version is not None
    assert ids(uri) == [1, 3, 4, 5]


def test_an_announcement_for_another_table_never_lands(uri: str) -> None:
    batch = announce(uri, 1, entry("a", 5))
    path = Path(uri) / batch.name
    path.write_text(path.read_text().replace(batch.table_id, "another"))
    for ident in (2, 3):
        assert commit(uri, ident).version is not None
    assert ids(uri) == [2, 3]


def test_a_later_number_makes_an_announcement_hopeless_and_it_is_taken_away(uri: str) -> None:
    old = committer(uri)
    assert committer(uri).move("a", 1)
    announce(uri, 1, entry("a", 5))
    piggybacked = committer(uri, contended=True)
    for turn in (1, 2):
        outcome = piggybacked.land(written(uri, 10 + turn), [entry("own", turn, seq(turn - 1))])
        assert outcome.version is not None
    assert announced(uri) == []
    assert old.land(written(uri, 2), [entry("a", 5)]) == CommitOutcome(None, ("a",))
    assert ids(uri) == [11, 12]


def test_of_two_announcements_of_a_shard_one_lands(uri: str) -> None:
    announce(uri, 1, entry("a", 5), entry("b", 1))
    announce(uri, 2, entry("a", 6), entry("c", 1))
    for turn in (10, 11, 12):
        commit(uri, turn)
    landed = [ident for ident in ids(uri) if ident < 10]
    assert len(landed) == 1
    assert committer(uri).stored("a") == {1: at(5), 2: at(6)}[landed[0]]


def test_a_committer_does_not_take_along_its_own_lease_twice(uri: str) -> None:
    announce(uri, 1, entry("own", 5))
    assert commit(uri, 2).version is not None
    assert ids(uri) == [2]


def test_a_batch_whose_file_is_gone_is_left_alone(uri: str) -> None:
    batch = announce(uri, 1, entry("a", 5))
    (Path(uri) / batch.files[0].path).unlink()
    assert commit(uri, 2).version is not None
    assert ids(uri) == [2]


def test_what_is_no_announcement_is_left_alone(uri: str) -> None:
    announce(uri, 1, entry("a", 5))
    folder = Path(uri) / FOLDER
    good = next(folder.glob("*.json")).read_text()
    (folder / f"{'2' * 32}.json").write_text(good[:40])
    (folder / "other.json").write_text("[]")
    (folder / "note.txt").write_text("hello")
    events: list[AnnouncementRejected] = []
    sink = Committer(DeltaSink(uri), "app", events=events.append)  # type: ignore[arg-type]
    sink._pace.lost(3)
    assert sink.land(written(uri, 2), [entry("own", 1)]).version is not None
    assert sink.land(written(uri, 3), [entry("own", 2, seq(1))]).version is not None
    assert ids(uri) == [1, 2, 3]
    assert announced(uri) == ["other.json"]
    assert sorted((Path(one.name).name, one.removed) for one in events) == [
        (f"{'2' * 32}.json", True),
        ("note.txt", False),
        ("other.json", False),
    ]


def test_a_store_of_announcements_that_fails_only_costs_the_company(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = committer(uri, contended=True)

    def broken(*_: object, **__: object) -> None:
        raise OSError("no space left")

    for method in ("create", "list", "delete"):
        monkeypatch.setattr(sink.delta_log.storage, method, broken)
    assert sink.land(written(uri, 1), [entry("a", 1)]).version == 1
    assert ids(uri) == [1]


def test_partition_values_survive_the_announcement(tmp_path: Path) -> None:
    uri = str(tmp_path / "parted")
    rows = pa.table({"id": [1, 2, 3], "day": ["a b/é", None, "x%2f.."]})
    batch = ArrowBatchWriter(None, uri, ("day",)).write(Batch("b", (), rows))
    sink = Committer(DeltaSink(uri, ("day",)), "app")
    sink.ensure(batch.output_schema)
    sent = announcing.announce(sink, batch.files, entry("a", 1, at(4)))
    assert sent.name
    reader = Committer(DeltaSink(uri, ("day",)), "app")
    reader._announcements._read(skip="")
    assert [one for one, _ in reader._announcements._known.values()] == [sent]


def looks_before_turn(pace: CommitPace, share: float) -> int:
    return next(number for number, is_turn in enumerate(pace.looks(share)) if is_turn)


def test_an_early_name_has_an_early_turn_and_the_turns_come_again() -> None:
    clock = NoWait()
    pace = CommitPace(clock, random.Random(3))
    assert not pace.contended
    pace.lost(100)
    assert pace.contended
    with pace.attempt():
        pass
    looks = [looks_before_turn(pace, share) for share in (0.0, 0.25, 1.0)]
    assert looks[0] == 0 < looks[1] < looks[2]
    again = [is_turn for is_turn, _ in zip(pace.looks(0.0), range(20), strict=False)]
    assert 1 < sum(again) < 20, "a turn that was left to others comes again"
    for _ in range(40):
        pace.landed(1)
    assert not pace.contended


class CopyingLog(MemoryLog):
    """A log whose batches are announced, and whose states are copies."""

    def batch_name(self, files: Sequence[DataFile]) -> str:
        return unique_name()

    def problem(self, name: str, files: Sequence[DataFile]) -> None:
        return None


def test_a_log_whose_states_are_copies_is_read_again_after_a_commit(tmp_path: Path) -> None:
    table = MemoryTable()
    log = CopyingLog(table, lambda: None)
    store = AnnouncementStore(LocalStorage(tmp_path))
    sink = TableSink(
        log,
        "app",
        dead_letters=lambda _: None,
        announcements=store,
        clock=NoWait(),
        rng=random.Random(1),
    )
    sink.ensure(SCHEMA)
    for number in range(1, 4):
        sink._pace.lost(2)
        landed = commit_entries(sink, table.id, NOTHING, [entry("a", number, seq(number - 1))])
        assert landed.version == number, f"refused {landed.refused}, which nobody else has"


def test_announcements_have_an_order(uri: str) -> None:
    names = sorted(announce(uri, ident, entry(f"a{ident}", 5)).name for ident in range(3))
    store = AnnouncementStore(open_storage(uri))
    assert [store.before(name) for name in names] == [0, 1, 2]
    store.reject(names[:1], "for the test")
    assert [store.before(name) for name in names] == [None, 0, 1]


class Shard:
    """Workers that commit ranges of one shard, one step at a time: pauses, crashes, takeovers and
    announcements in any order. No lease decides who may commit.
    """

    def __init__(self, uri: str, seed: int) -> None:
        self.uri, self.rng, self.turn = uri, random.Random(seed), 0
        self.sinks = [committer(uri) for _ in range(3)]
        self.workers: list[dict] = [{"at": "read"} for _ in range(3)]
        self.done: list[str] = []

    def step(self) -> None:
        who = self.rng.randrange(3)
        worker, roll = self.workers[who], self.rng.random()
        if roll < 0.04:
            self.workers[who], action = {"at": "read"}, "crash"
        elif roll < 0.2:
            self.turn += 1
            bystander = committer(self.uri, contended=True, application="bystander")
            bystander.land(written(self.uri), [entry("own", self.turn, seq(self.turn - 1))])
            action = "anyone lands what is announced"
        else:
            action = worker["at"]
            getattr(self, action)(worker, self.sinks[who])
        self.done.append(f"{who}: {action}")

    def read(self, worker: dict, sink: Committer) -> None:
        worker["stored"] = stored = sink.stored("s")
        begin = 0 if stored.position is None else int(stored.position.sequence_number)
        worker["end"] = begin + self.rng.randint(1, 3)
        worker["batch"] = written(self.uri, *range(begin + 1, worker["end"] + 1))
        worker["at"] = "announce" if self.rng.random() < 0.8 else "land"

    def announce(self, worker: dict, sink: Committer) -> None:
        one = entry("s", worker["end"], worker["stored"])
        announcing.announce(sink, worker["batch"].files, one)
        worker["at"] = "land"

    def land(self, worker: dict, sink: Committer) -> None:
        if self.rng.random() < 0.3:
            sink._pace.lost(2)
        sink.land(worker["batch"], [entry("s", worker["end"], worker["stored"])])
        worker["at"] = "read"


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 10))]
)
def test_any_schedule_of_pauses_crashes_and_takeovers_keeps_the_range_whole(
    tmp_path: Path, seed: int
) -> None:
    uri = str(tmp_path / "table")
    committer(uri).ensure(SCHEMA)
    shard = Shard(uri, seed)
    for _ in range(200):
        shard.step()
    landed = ids(uri)
    assert landed == list(range(1, len(landed) + 1)), f"seed {seed}: {shard.done}"
    assert landed, "some of it must have landed, or nothing was tried"
    added = [line["add"]["path"] for line in log_lines(uri) if "add" in line]
    assert len(added) == len(set(added))
    assert DeltaTable(uri).version() >= len(added)
