"""Combined commits: an announced batch lands once or never, by the first worker that commits, on
exactly the numbers it expects.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from kcl_pipeline.batch import Batch, CommitEntry, CommitOutcome, TxnVersions
from kcl_pipeline.delta.arrow_writer import ArrowBatchWriter
from kcl_pipeline.delta.commits.announcements import (
    FOLDER,
    FORMAT,
    FORMAT_OF_LONG_NAMES,
    Claim,
    PreparedBatch,
)
from kcl_pipeline.delta.commits.combined import AnnouncementStore, Pace
from kcl_pipeline.delta.log.delta_log import DeltaLog
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.events import AnnouncementRejected
from tests.support import announcing
from tests.support.delta_tables import NoWait, ids, log_lines, written

SCHEMA = pa.schema([("id", pa.int64())])
NONE = TxnVersions()


@pytest.fixture
def uri(tmp_path: Path) -> str:
    path = str(tmp_path / "table")
    committer(path).ensure_table(SCHEMA)
    return path


def committer(uri: str, *, contended: bool = False, application: str = "app") -> DeltaCommitter:
    sink = DeltaCommitter(DeltaSink(uri), application, clock=NoWait(), rng=random.Random(7))
    if contended:
        sink._pace.lost(3)
    return sink


def claim(key: str, number: int, expected: TxnVersions = NONE, application: str = "app") -> Claim:
    return Claim(f"{application}/{key}", f"{application}/{key}/fence", number, expected)


def announce(uri: str, ident: int, *claims: Claim) -> PreparedBatch:
    sink = committer(uri)
    return announcing.announce(sink, written(uri, ident).files, *claims)


def announced(uri: str) -> list[str]:
    return sorted(file.name for file in (Path(uri) / FOLDER).glob("*.json"))


def commit(uri: str, ident: int, key: str = "own") -> CommitOutcome:
    """A commit of somebody who met other writers lately, on a lease of his own."""
    sink = committer(uri, contended=True)
    number = sink.txn_versions([key])[key]
    return sink.commit(written(uri, ident), [CommitEntry(key, (number.data or 0) + 1, number)])


def test_who_commits_takes_along_what_is_announced(uri: str) -> None:
    announce(uri, 1, claim("a", 5), claim("b", 6))
    announce(uri, 2, claim("c", 7, application="other"))
    assert commit(uri, 3).version == 1
    assert ids(uri) == [1, 2, 3]
    assert announced(uri) == []
    assert committer(uri).txn_versions(["a", "b"]) == {"a": TxnVersions(5), "b": TxnVersions(6)}
    assert committer(uri).commit(
        written(uri, 9), [CommitEntry("a", 5, NONE), CommitEntry("b", 6, NONE)]
    ) == CommitOutcome(1), "the owner finds it landed"
    assert ids(uri) == [1, 2, 3]


def test_alone_nothing_is_announced_or_looked_for(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnnouncementStore, "announce", lambda *_: pytest.fail("announced"))
    monkeypatch.setattr(AnnouncementStore, "piggybacked", lambda *_: pytest.fail("looked for"))
    sink = committer(uri)
    for turn in range(1, 4):
        assert (
            sink.commit(
                written(uri, turn), [CommitEntry("a", turn, TxnVersions(turn - 1 or None))]
            ).version
            == turn
        )


def test_who_loses_the_race_announces_and_is_taken_along(uri: str) -> None:
    loser, winner = committer(uri), committer(uri, contended=True)
    append, raced = loser._log.append, []

    def too_late(*arguments: object) -> None:
        raced.append(True)
        if len(raced) == 1:
            winner.commit(written(uri, 1), [CommitEntry("w", 1, NONE)])
        append(*arguments)  # type: ignore[arg-type]

    def winner_comes(_seconds: float) -> None:
        if announced(uri):
            winner.commit(written(uri, 2), [CommitEntry("w", 2, TxnVersions(1))])

    loser._log.append = too_late  # type: ignore[method-assign]
    loser._clock.sleep = winner_comes  # type: ignore[method-assign]
    assert loser.commit(written(uri, 3), [CommitEntry("a", 1, NONE)]) == CommitOutcome(2)
    assert raced == [True], "it tried once, the rest was done for it"
    assert ids(uri) == [1, 2, 3]
    assert announced(uri) == []


def test_an_owner_that_looks_late_still_learns_that_its_batch_was_taken_along(uri: str) -> None:
    """Between its announcement and its next look the batch lands and the lease moves on."""
    owner, other = committer(uri), committer(uri, contended=True)
    owner._pace.lost(3)

    def both(_seconds: float) -> None:
        if announced(uri):
            other.commit(written(uri, 2), [CommitEntry("w", 1, NONE)])
            other.commit(written(uri, 3), [CommitEntry("a", 9, TxnVersions(1))])

    owner._clock.sleep = both  # type: ignore[method-assign]
    owner._rng.seed(1)
    assert owner.commit(written(uri, 1), [CommitEntry("a", 1, NONE)]) == CommitOutcome(1)
    assert ids(uri) == [1, 2, 3]


@pytest.mark.parametrize(
    "expected", [TxnVersions(5), TxnVersions(4, 1), TxnVersions(None, 1), NONE, TxnVersions(8)]
)
def test_only_exactly_the_expected_numbers_will_do(uri: str, expected: TxnVersions) -> None:
    """The table has data 4 and no fence; a higher number than the table's is no reason to land."""
    committer(uri).commit(written(uri, 1), [CommitEntry("a", 4, NONE)])
    announce(uri, 2, claim("a", 9, expected), claim("b", 9))
    assert commit(uri, 3).version is not None
    assert ids(uri) == [1, 3]
    announce(uri, 4, claim("a", 9, TxnVersions(4)), claim("b", 9))
    assert commit(uri, 5).version is not None
    assert ids(uri) == [1, 3, 4, 5]


def test_a_fence_makes_an_announcement_hopeless_and_it_is_taken_away(uri: str) -> None:
    old = committer(uri)
    log = DeltaLog(uri)
    log.refresh()
    log.append((), {"app/a/fence": 1})
    announce(uri, 1, claim("a", 5))
    piggybacked = committer(uri, contended=True)
    for turn in (1, 2):
        assert (
            piggybacked.commit(
                written(uri, 10 + turn), [CommitEntry("own", turn, TxnVersions(turn - 1 or None))]
            ).version
            is not None
        )
    assert announced(uri) == []
    assert old.commit(written(uri, 2), [CommitEntry("a", 5, NONE)]) == CommitOutcome(None, ("a",))
    assert ids(uri) == [11, 12]


def test_a_taker_lands_what_the_dead_owner_announced_instead_of_fencing(uri: str) -> None:
    announce(uri, 1, claim("a", 5), claim("b", 2))
    announce(uri, 2, claim("z", 1))
    taker = committer(uri)
    assert taker.fence("a", NONE) is None, "read again"
    assert taker.txn_versions(["a", "b"]) == {"a": TxnVersions(5), "b": TxnVersions(2)}
    assert ids(uri) == [1]
    assert taker.fence("a", TxnVersions(5)) == TxnVersions(5, 1)
    assert len(announced(uri)) == 1


def test_of_two_announcements_of_a_lease_one_lands(uri: str) -> None:
    announce(uri, 1, claim("a", 5), claim("b", 1))
    announce(uri, 2, claim("a", 6), claim("c", 1))
    for turn in (10, 11, 12):
        commit(uri, turn)
    landed = [ident for ident in ids(uri) if ident < 10]
    assert len(landed) == 1
    assert committer(uri).txn_versions(["a"])["a"].data == {1: 5, 2: 6}[landed[0]]


def test_a_committer_does_not_take_along_its_own_lease_twice(uri: str) -> None:
    announce(uri, 1, claim("own", 5))
    assert commit(uri, 2).version is not None
    assert ids(uri) == [2]


def test_a_batch_whose_file_is_gone_is_left_alone(uri: str) -> None:
    batch = announce(uri, 1, claim("a", 5))
    (Path(uri) / batch.files[0].path).unlink()
    assert commit(uri, 2).version is not None
    assert ids(uri) == [2]


def test_what_is_no_announcement_is_left_alone(uri: str) -> None:
    announce(uri, 1, claim("a", 5))
    folder = Path(uri) / FOLDER
    good = next(folder.glob("*.json")).read_text()
    format_ = f'"format":{FORMAT_OF_LONG_NAMES}'
    later = good.replace(format_, f'"format":{FORMAT + 1}').replace("app/a", "app/b")
    assert later != good
    (folder / f"{'1' * 32}.json").write_text(later)
    (folder / f"{'2' * 32}.json").write_text(good[:40])
    (folder / "other.json").write_text("[]")
    (folder / "note.txt").write_text("hello")
    events: list[AnnouncementRejected] = []
    sink = DeltaCommitter(DeltaSink(uri), "app", events=events.append)  # type: ignore[arg-type]
    sink._pace.lost(3)
    assert sink.commit(written(uri, 2), [CommitEntry("own", 1, NONE)]).version is not None
    assert sink.commit(written(uri, 3), [CommitEntry("own", 2, TxnVersions(1))]).version is not None
    assert ids(uri) == [1, 2, 3]
    assert announced(uri) == [f"{'1' * 32}.json", "other.json"]
    assert sorted((Path(one.name).name, one.removed) for one in events) == [
        (f"{'1' * 32}.json", False),
        (f"{'2' * 32}.json", True),
        ("note.txt", False),
        ("other.json", False),
    ]


def test_a_store_of_announcements_that_fails_only_costs_the_company(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = committer(uri, contended=True)

    def broken(*_: object) -> None:
        raise OSError("no space left")

    for method in ("create", "list", "delete"):
        monkeypatch.setattr(sink._log.storage, method, broken)
    assert sink.commit(written(uri, 1), [CommitEntry("a", 1, NONE)]).version == 1
    assert ids(uri) == [1]


def test_partition_values_survive_the_announcement(tmp_path: Path) -> None:
    uri = str(tmp_path / "parted")
    rows = pa.table({"id": [1, 2, 3], "day": ["a b/é", None, "x%2f.."]})
    batch = ArrowBatchWriter(None, uri, ("day",)).write(Batch("b", (), rows))
    sink = DeltaCommitter(DeltaSink(uri, ("day",)), "app")
    sink.ensure_table(batch.schema)
    sent = announcing.announce(sink, batch.files, claim("a", 1, TxnVersions(None, 4)))
    assert sent.name
    reader = DeltaCommitter(DeltaSink(uri, ("day",)), "app")
    reader._announcements._read(skip="")
    assert [one for one, _ in reader._announcements._known.values()] == [sent]


def test_the_wait_grows_with_the_number_of_writers_and_ends() -> None:
    clock = NoWait()
    pace = Pace(clock, random.Random(3))
    assert not pace.contended
    pace.lost(1)
    few = max(len(list(pace.polls())) for _ in range(20))
    pace.lost(32)
    many = max(len(list(pace.polls())) for _ in range(20))
    assert pace.contended
    assert few < many <= 2 * 32 * 2
    for _ in range(20):
        pace.landed(1)
    assert not pace.contended


@dataclass
class Row:
    """The lease row of the model: owner, counter, checkpoint, pending (end, number)."""

    owner: int = -1
    counter: int = 0
    checkpoint: int = 0
    pending: tuple[int, int] | None = None


class Shard:
    """The commit protocol over a real table, one step at a time: pauses, crashes, takeovers
    and announcements in any order.
    """

    def __init__(self, uri: str, seed: int) -> None:
        self.uri, self.rng, self.row, self.turn = uri, random.Random(seed), Row(), 0
        self.sinks = [committer(uri) for _ in range(3)]
        self.workers: list[dict] = [{"at": "idle"} for _ in range(3)]
        self.done: list[str] = []

    def step(self) -> None:
        who = self.rng.randrange(3)
        worker, roll = self.workers[who], self.rng.random()
        if roll < 0.12:
            self.row.owner, self.row.counter = who, self.row.counter + 1
            action = "assign"
        elif roll < 0.14:
            self.workers[who], action = {"at": "idle"}, "crash"
        elif roll < 0.3:
            self.turn += 1
            bystander = committer(self.uri, contended=True, application="bystander")
            bystander.commit(
                written(self.uri),
                [CommitEntry("own", self.turn, TxnVersions(self.turn - 1 or None))],
            )
            action = "anyone lands what is announced"
        else:
            action = worker["at"]
            getattr(self, action)(who, worker, self.sinks[who])
        self.done.append(f"{who}: {action}")

    def mine(self, who: int, worker: dict) -> bool:
        return self.row.owner == who and self.row.counter == worker["counter"]

    def idle(self, who: int, worker: dict, sink: DeltaCommitter) -> None:
        if self.row.owner == who:
            self.workers[who] = {
                "at": "load",
                "counter": self.row.counter,
                "from": self.row.checkpoint,
                "pending": self.row.pending,
            }

    def load(self, who: int, worker: dict, sink: DeltaCommitter) -> None:
        worker["txn_versions"] = sink.txn_versions(["s"])["s"]
        if worker["pending"] is None:
            worker["at"] = "read"
        elif worker["txn_versions"].data == worker["pending"][1]:
            worker["end"], worker["at"] = worker["pending"][0], "checkpoint"
        else:
            worker["at"] = "settle"

    def settle(self, who: int, worker: dict, sink: DeltaCommitter) -> None:
        fenced = sink.fence("s", worker["txn_versions"])
        worker["at"] = "load" if fenced is None else "read"
        worker["txn_versions"] = fenced

    def read(self, who: int, worker: dict, sink: DeltaCommitter) -> None:
        if not self.mine(who, worker):
            self.workers[who] = {"at": "idle"}
            return
        worker["end"] = worker["from"] + self.rng.randint(1, 3)
        self.row.counter += 1
        worker["counter"] = worker["number"] = self.row.counter
        self.row.pending = (worker["end"], self.row.counter)
        worker["batch"] = written(self.uri, *range(worker["from"] + 1, worker["end"] + 1))
        worker["at"] = "announce" if self.rng.random() < 0.8 else "land"

    def announce(self, who: int, worker: dict, sink: DeltaCommitter) -> None:
        announcing.announce(
            sink, worker["batch"].files, claim("s", worker["number"], worker["txn_versions"])
        )
        worker["at"] = "land"

    def land(self, who: int, worker: dict, sink: DeltaCommitter) -> None:
        if self.rng.random() < 0.3:
            sink._pace.lost(2)
        outcome = sink.commit(
            worker["batch"], [CommitEntry("s", worker["number"], worker["txn_versions"])]
        )
        worker["txn_versions"] = TxnVersions(worker["number"], worker["txn_versions"].fence)
        worker["at"] = "idle" if outcome.version is None else "checkpoint"

    def checkpoint(self, who: int, worker: dict, sink: DeltaCommitter) -> None:
        if not self.mine(who, worker):
            self.workers[who] = {"at": "idle"}
            return
        self.row.counter += 1
        self.row.checkpoint, self.row.pending = worker["end"], None
        worker["counter"], worker["from"], worker["pending"], worker["at"] = (
            self.row.counter,
            worker["end"],
            None,
            "read",
        )


@pytest.mark.parametrize("seed", range(5))
def test_any_schedule_of_pauses_crashes_and_takeovers_keeps_the_range_whole(
    tmp_path: Path, seed: int
) -> None:
    uri = str(tmp_path / "table")
    committer(uri).ensure_table(SCHEMA)
    shard = Shard(uri, seed)
    for _ in range(300):
        shard.step()
    landed = ids(uri)
    assert landed == list(range(1, len(landed) + 1)), f"seed {seed}: {shard.done}"
    assert shard.row.checkpoint <= len(landed)
    assert landed, "some of it must have landed, or nothing was tried"
    added = [line["add"]["path"] for line in log_lines(uri) if "add" in line]
    assert len(added) == len(set(added))
    assert DeltaTable(uri).version() >= len(added)
