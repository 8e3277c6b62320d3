"""A folder that is emptied, replaced, or restored while a process has the table open."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from kcl_pipeline.batch import CommitEntry, TxnVersions, Written, shard_key
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.errors import SinkError
from kcl_pipeline.position import Position

KEY = shard_key("a", "arn:aws:kinesis:eu-west-1:1:stream/s/17/a")
SCHEMA = pa.schema([pa.field("n", pa.int64())])
NOTHING = Written((), SCHEMA, 0)


def committer(folder: Path) -> DeltaCommitter:
    sink = DeltaCommitter(DeltaSink(str(folder)), "app")
    sink.ensure_table(SCHEMA)
    return sink


def commit(sink: DeltaCommitter, end: int) -> TxnVersions:
    entry = CommitEntry.to(KEY, sink.txn_versions([KEY])[KEY], Position(str(end)))
    assert sink.commit(NOTHING, [entry]).version is not None
    return sink.txn_versions([KEY])[KEY]


def entries(folder: Path) -> list[str]:
    return sorted(one.name for one in (folder / "_delta_log").glob("*.json"))


def test_versions_have_the_id_of_the_table(tmp_path: Path) -> None:
    first, second = committer(tmp_path / "one"), committer(tmp_path / "two")
    one, two = first.txn_versions([KEY])[KEY], second.txn_versions([KEY])[KEY]
    assert one.table is not None
    assert two.table not in (None, one.table)
    assert DeltaCommitter(DeltaSink(str(tmp_path / "one")), "app").txn_versions([KEY])[
        KEY
    ].table == (one.table)


@pytest.mark.parametrize("more", [0, 3])
def test_a_batch_does_not_land_in_a_table_that_replaced_its_own(tmp_path: Path, more: int) -> None:
    folder = tmp_path / "table"
    sink = committer(folder)
    known = commit(sink, 5)
    shutil.rmtree(folder)
    other = committer(folder)
    for end in range(more):
        assert other.commit(NOTHING, [CommitEntry(f"b{end}", 1, TxnVersions())]).version is not None
    before = entries(folder)
    entry = CommitEntry.to(KEY, known, Position("8"))
    assert sink.commit(NOTHING, [entry]).refused == (KEY,)
    assert sink.move(KEY, known, Position("8"), ended=False) is None
    assert entries(folder) == before
    assert sink.txn_versions([KEY])[KEY].table != known.table


def test_the_same_numbers_of_another_table_are_others(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    sink = committer(folder)
    known = commit(sink, 5)
    shutil.rmtree(folder)
    assert commit(committer(folder), 5) == known
    before = entries(folder)
    assert sink.commit(NOTHING, [CommitEntry.to(KEY, known, Position("8"))]).refused == (KEY,)
    assert entries(folder) == before


def test_a_batch_does_not_land_in_a_table_that_was_restored(tmp_path: Path) -> None:
    folder, backup = tmp_path / "table", tmp_path / "backup"
    sink = committer(folder)
    old = commit(sink, 5)
    shutil.copytree(folder, backup)
    known = commit(sink, 7)
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)
    before = entries(folder)
    assert sink.commit(NOTHING, [CommitEntry.to(KEY, known, Position("8"))]).refused == (KEY,)
    assert entries(folder) == before
    assert sink.txn_versions([KEY])[KEY] == old


def test_a_batch_does_not_land_in_an_empty_folder(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    sink = committer(folder)
    known = commit(sink, 5)
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(SinkError, match="does not exist"):
        sink.commit(NOTHING, [CommitEntry.to(KEY, known, Position("8"))])
    assert list(folder.iterdir()) == []
