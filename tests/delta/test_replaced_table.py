"""A folder that is emptied, replaced, or put back while a process has the table open."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.errors import SinkError
from kcl_pipeline.position import NOTHING_STORED, Position
from kcl_pipeline.sinks.sink import Positions
from tests.support.delta_tables import NOTHING, Entry, commit_entries, entry_of

KEY = "arn:aws:kinesis:eu-west-1:1:stream/s/17/a"
SCHEMA = pa.schema([pa.field("n", pa.int64())])


def committer(folder: Path) -> DeltaCommitter:
    sink = DeltaCommitter(DeltaSink(str(folder)), "app")
    sink.ensure(SCHEMA)
    return sink


def entry(known: Positions, end: int) -> Entry:
    return entry_of(KEY, known.shards[KEY], Position(str(end)))


def commit(sink: DeltaCommitter, end: int) -> Positions:
    known = sink.positions([KEY])
    assert commit_entries(sink, known.table_id, NOTHING, [entry(known, end)]).version is not None
    return sink.positions([KEY])


def entries(folder: Path) -> list[str]:
    return sorted(one.name for one in (folder / "_delta_log").glob("*.json"))


def test_positions_have_the_id_of_the_table(tmp_path: Path) -> None:
    first, second = committer(tmp_path / "one"), committer(tmp_path / "two")
    one, two = first.positions([]).table_id, second.positions([]).table_id
    assert one is not None
    assert two not in (None, one)
    assert DeltaCommitter(DeltaSink(str(tmp_path / "one")), "app").positions([]).table_id == one


@pytest.mark.parametrize("more", [0, 3])
def test_a_batch_does_not_land_in_a_table_that_replaced_its_own(tmp_path: Path, more: int) -> None:
    folder = tmp_path / "table"
    sink = committer(folder)
    known = commit(sink, 5)
    shutil.rmtree(folder)
    other = committer(folder)
    for end in range(more):
        table_id = other.positions([]).table_id
        one = entry_of(f"b{end}", NOTHING_STORED, Position("1"))
        assert commit_entries(other, table_id, NOTHING, [one]).version is not None
    before = entries(folder)
    assert commit_entries(sink, known.table_id, NOTHING, [entry(known, 8)]).refused == (KEY,)
    assert entries(folder) == before
    assert sink.positions([KEY]).table_id != known.table_id


def test_the_same_position_of_another_table_is_another(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    sink = committer(folder)
    known = commit(sink, 5)
    shutil.rmtree(folder)
    assert commit(committer(folder), 5).shards == known.shards
    before = entries(folder)
    assert commit_entries(sink, known.table_id, NOTHING, [entry(known, 8)]).refused == (KEY,)
    assert entries(folder) == before


def test_a_batch_does_not_land_in_a_copy_that_was_put_back(tmp_path: Path) -> None:
    folder, backup = tmp_path / "table", tmp_path / "backup"
    sink = committer(folder)
    old = commit(sink, 5)
    shutil.copytree(folder, backup)
    known = commit(sink, 7)
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)
    before = entries(folder)
    assert commit_entries(sink, known.table_id, NOTHING, [entry(known, 8)]).refused == (KEY,)
    assert entries(folder) == before
    assert sink.positions([KEY]) == old


def test_a_batch_does_not_land_in_an_empty_folder(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    sink = committer(folder)
    known = commit(sink, 5)
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(SinkError, match="does not exist"):
        commit_entries(sink, known.table_id, NOTHING, [entry(known, 8)])
    assert list(folder.iterdir()) == []
