"""A file on a local disk, and the folders to it, are synced before the log names the file."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from kcl_pipeline.batch import Batch
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.object_store import open_storage
from tests.support.delta_tables import commit_entries, committer, entry

SCHEMA = pa.schema([("id", pa.int64()), ("day", pa.string())])


class Syncs:
    """What was synced, in order: inode and size of files, inode and names of folders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: list[tuple[int, int]] = []
        self.names: dict[str, set[str]] = {}
        self.order: list[str] = []
        original = os.fsync

        def fsync(descriptor: int) -> None:
            original(descriptor)
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if path.is_dir():
                self.names[str(path)] = {one.name for one in path.iterdir()}
                self.order.append("folder")
            else:
                found = os.fstat(descriptor)
                self.files.append((found.st_ino, found.st_size))
                self.order.append("file")

        monkeypatch.setattr(os, "fsync", fsync)

    def has(self, path: Path, root: Path) -> bool:
        """Whether the file with its whole content, and each name from the root to it, is synced."""
        found = path.stat()
        steps = [path, *path.parents]
        inner = steps[: steps.index(root)]
        return (found.st_ino, found.st_size) in self.files and all(
            one.name in self.names.get(str(one.parent), ()) for one in inner
        )


@pytest.mark.parametrize("partition_by", [(), ("day",)])
def test_files_are_on_the_disk_before_a_commit_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition_by: tuple[str, ...]
) -> None:
    uri = tmp_path / "t"
    sink = committer(str(uri), partition_by=partition_by)
    sink.ensure(SCHEMA)
    syncs = Syncs(monkeypatch)
    rows = pa.table({"id": [1, 2], "day": ["a", "b"]}, SCHEMA)
    writer = ArrowBatchWriter(None, str(uri), partition_by)
    for number in (1, 2):
        written = writer.write(Batch("b", (), rows))
        paths = [uri / file.path for file in written.files]
        assert len(paths) == (2 if partition_by else 1)
        assert all(syncs.has(path, uri) for path in paths)
        now = sink.positions(["a"])
        one = entry("a", number, now.shards["a"])
        assert commit_entries(sink, now.table_id, written, [one]).version == number
    assert DeltaTable(str(uri)).version() == 2


def test_the_content_is_synced_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = Syncs(monkeypatch)
    with open_storage(str(tmp_path / "new/table")).create("a/b/c.bin") as stream:
        stream.write(b"content")
    assert syncs.order[0] == "file"
    assert syncs.has(tmp_path / "new/table/a/b/c.bin", tmp_path)


def test_a_disk_that_cannot_sync_fails_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> None:
        raise OSError(5, "Input/output error")

    storage = open_storage(str(tmp_path))
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output"), storage.create("a.bin") as stream:
        stream.write(b"x")
    assert list(tmp_path.iterdir()) == []
