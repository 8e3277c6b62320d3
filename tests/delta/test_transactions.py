"""All application transactions in one reading are those that delta-rs finds one by one, or none are
given.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from kcl_pipeline.delta.log import DeltaLog, entry_path, read_transactions
from kcl_pipeline.delta.sink import transaction_names
from kcl_pipeline.delta.storage import LocalStorage
from kcl_pipeline.errors import SinkError
from tests.support.delta_tables import NONE, committer, entry, seq, upkeep_ended, written

SCHEMA = pa.schema([("id", pa.int64())])


def grown(
    folder: Path, seed: int, versions: int = 40, *, interval: str = "1000"
) -> tuple[str, set[str]]:
    """A table whose log has transactions of several names and applications, and now and then a
    checkpoint; and the ids in it.
    """
    uri, rng, names = str(folder / f"table-{seed}"), random.Random(seed), set()
    committer(uri, table_properties={"delta.checkpointInterval": interval}).ensure(SCHEMA)
    log = DeltaLog(uri)
    for turn in range(1, versions):
        assert log.refresh()
        numbers = {
            rng.choice(["app/", "other/"])
            + str(rng.randrange(9))
            + rng.choice(["", "/more"]): rng.randrange(10**12)
            for _ in range(rng.randrange(4))
        }
        names |= set(numbers)
        log.append(written(uri, turn).files if rng.random() < 0.3 else (), numbers)
        if rng.random() < 0.15:
            DeltaTable(uri).create_checkpoint()
    return uri, names


def asked(uri: str, names: set[str], version: int | None = None) -> dict[str, int]:
    """What delta-rs says."""
    table = DeltaTable(uri, version=version)
    return {
        name: number for name in names if (number := table.transaction_version(name)) is not None
    }


def log_file(uri: str, name: str) -> Path:
    return Path(uri) / "_delta_log" / name


def last_checkpoint(uri: str) -> dict:
    return dict(json.loads(log_file(uri, "_last_checkpoint").read_text()))


@pytest.mark.parametrize("seed", range(6))
def test_one_reading_finds_what_many_questions_find(tmp_path: Path, seed: int) -> None:
    uri, names = grown(tmp_path, seed)
    storage, newest = LocalStorage(Path(uri)), DeltaTable(uri).version()
    checkpointed = last_checkpoint(uri)["version"]
    for version in range(checkpointed, newest + 1):
        assert read_transactions(storage, version) == asked(uri, names, version)
    for version in range(checkpointed):
        log_file(uri, f"{version:020d}.json").unlink()
    assert read_transactions(storage, newest) == asked(uri, names)
    assert len(asked(uri, names)) > 5
    log_file(uri, f"{checkpointed:020d}.checkpoint.parquet").rename(log_file(uri, "gone"))
    assert read_transactions(storage, newest) is None


def test_a_checkpoint_in_several_parts(tmp_path: Path) -> None:
    uri, names = grown(tmp_path, 1)
    DeltaTable(uri).create_checkpoint()
    hint = last_checkpoint(uri)
    whole = log_file(uri, f"{hint['version']:020d}.checkpoint.parquet")
    rows = pq.read_table(whole)
    for part in range(3):
        pq.write_table(
            rows.slice(
                part * rows.num_rows // 3,
                (part + 1) * rows.num_rows // 3 - part * rows.num_rows // 3,
            ),
            _part(whole, part + 1),
        )
    whole.unlink()
    log_file(uri, "_last_checkpoint").write_text(json.dumps(hint | {"parts": 3}))
    storage = LocalStorage(Path(uri))
    assert read_transactions(storage, hint["version"]) == asked(uri, names)
    _part(whole, 2).unlink()
    assert read_transactions(storage, hint["version"]) is None


def _part(whole: Path, part: int) -> Path:
    return whole.with_name(whole.name.replace("parquet", f"{part:010d}.{3:010d}.parquet"))


def newest_entry_is_gone(uri: str, version: int) -> None:
    log_file(uri, f"{version:020d}.json").unlink()


def checkpoint_is_newer(uri: str, version: int) -> None:
    other = DeltaLog(uri)
    other.refresh()
    assert other.version == version
    other.append((), {"app/1": 6})
    DeltaTable(uri).create_checkpoint()


def hint_is_torn(uri: str, version: int) -> None:
    log_file(uri, "_last_checkpoint").write_text(f'{{"version":{version}')


def hint_is_odd(uri: str, version: int) -> None:
    log_file(uri, "_last_checkpoint").write_text(f"[{version}]")


def no_column_of_transactions(uri: str, _version: int) -> None:
    whole = log_file(uri, f"{last_checkpoint(uri)['version']:020d}.checkpoint.parquet")
    pq.write_table(pq.read_table(whole).drop_columns(["txn"]), whole)


SPOILERS = [
    newest_entry_is_gone,
    checkpoint_is_newer,
    hint_is_torn,
    hint_is_odd,
    no_column_of_transactions,
]


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: spoil.__name__)
def test_what_is_not_understood_is_not_answered(
    tmp_path: Path, spoil: Callable[[str, int], None]
) -> None:
    uri, _ = grown(tmp_path, 2)
    DeltaTable(uri).create_checkpoint()
    log = DeltaLog(uri)
    log.refresh()
    log.append((), {"app/1": 5})
    newest = DeltaTable(uri).version()
    storage = LocalStorage(Path(uri))
    assert read_transactions(storage, newest) is not None
    spoil(uri, newest)
    assert read_transactions(storage, newest) is None


def test_a_table_without_checkpoints_is_read_from_its_first_entry_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = str(tmp_path / "table")
    sink = committer(uri)
    sink.ensure(SCHEMA)
    for turn in (1, 2, 3):
        sink.land(written(uri), [entry("a", turn, seq(turn - 1))])
    storage = LocalStorage(Path(uri))
    low = transaction_names("app/a")[1]
    found = [read_transactions(storage, version) for version in range(4)]
    assert found[0] == {}
    assert [one and one[low] for one in found[1:]] == [1, 2, 3]
    monkeypatch.setattr("kcl_pipeline.delta.log.MAX_ENTRIES", 3)
    assert [read_transactions(storage, version) for version in (2, 3)] == [found[2], None]


def test_what_cannot_be_read_at_once_is_asked_one_by_one(tmp_path: Path) -> None:
    uri, names = grown(tmp_path, 2)
    behind, expected = DeltaLog(uri), asked(uri, names)
    assert behind.refresh()
    checkpoint_is_newer(uri, behind.version)
    assert {name: behind.transaction(name) for name in names} == {
        name: expected.get(name) for name in names
    }
    assert behind.transaction("app/unheard of") is None


def test_what_was_peeked_at_stays_newer_than_what_is_read_for_the_version(tmp_path: Path) -> None:
    uri, _ = grown(tmp_path, 3)
    ahead, other = DeltaLog(uri), DeltaLog(uri)
    for log in (ahead, other):
        log.refresh()
    other.append((), {"app/1": 77, "third/x": 1})
    assert ahead.peek()
    assert {name: ahead.transaction(name) for name in ("app/0", "app/1", "third/x")} == asked(
        uri, {"app/0", "app/1", "third/x"}
    )


def test_many_numbers_cost_one_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, _ = grown(tmp_path, 4)
    sink, reads = committer(uri), []
    read = sink.delta_log.storage.read
    monkeypatch.setattr(
        sink.delta_log.storage,
        "read",
        lambda path, limit=None: reads.append(path) or read(path, limit),
    )
    monkeypatch.setattr(DeltaTable, "transaction_version", lambda *_: pytest.fail("one by one"))
    assert len(sink.positions([str(lease) for lease in range(100)]).shards) == 100
    assert len(reads) == len(set(reads)) + 1, "only the newest entry is read twice"
    assert len(set(reads)) <= 1 + DeltaTable(uri).version() - last_checkpoint(uri)["version"]
    first = len(reads)
    sink.positions([str(lease) for lease in range(100, 200)])
    newest = DeltaTable(uri).version()
    # The newest entry again, and the one after it, which does not exist.
    assert sorted(reads[first:]) == [entry_path(newest), entry_path(newest + 1)]


def test_a_log_whose_transactions_cannot_be_read_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log cleanup may remove what the handle of delta-rs needs."""
    uri, _ = grown(tmp_path, 5)
    sink = committer(uri)
    with monkeypatch.context() as patched:
        patched.setattr("kcl_pipeline.delta.log.read_transactions", lambda *_: None)
        assert sink.stored("x") == NONE
        patched.setattr(
            DeltaTable, "transaction_version", lambda *_: (_ for _ in ()).throw(OSError("removed"))
        )
        with pytest.raises(SinkError, match="removed"):
            sink.stored("y")
    monkeypatch.setattr(DeltaTable, "transaction_version", lambda *_: pytest.fail("one by one"))
    assert (sink.stored("x"), sink.stored("y")) == (NONE, NONE)


def test_checkpoints_come_at_the_interval(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    sinks = [committer(uri) for _ in range(2)]
    sinks[0].ensure(SCHEMA)
    for turn in range(1, 103):
        sink = sinks[turn % 2]
        assert sink.land(written(uri), [entry("a", turn, seq(turn - 1))]).version == turn
        assert upkeep_ended(sink.delta_log, 30)
    assert sorted(
        file.name[:20] for file in (Path(uri) / "_delta_log").glob("*.checkpoint.parquet")
    ) == [f"{50:020d}", f"{100:020d}"]
    assert last_checkpoint(uri)["version"] == 100
    reads: list[str] = []
    storage = LocalStorage(Path(uri))
    read = storage.read

    def counted(path: str, limit: int | None = None) -> bytes | None:
        reads.append(path)
        return read(path, limit)

    storage.read = counted  # type: ignore[method-assign]
    assert (read_transactions(storage, 102) or {})[transaction_names("app/a")[1]] == 102
    assert len(reads) == 3, (
        "the hint and the entries after the last checkpoint, however long the log is"
    )


def test_a_table_that_forgets_transactions_is_refused(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    committer(uri).ensure(SCHEMA)
    DeltaTable(uri).alter.set_table_properties(
        {"delta.setTransactionRetentionDuration": "interval 1 days"}
    )
    with pytest.raises(SinkError, match=r"expire \(delta\.setTransactionRetentionDuration\)"):
        committer(uri).ensure(SCHEMA)
