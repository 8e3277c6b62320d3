"""Compact and vacuum of `kcl-pipeline do`, and the retention that announcements need."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from kcl_pipeline.delta import storage as local
from kcl_pipeline.delta.maintenance import guarded_retention, measured_vacuum, vacuum
from kcl_pipeline.errors import SinkError
from tests.support.announcing import announce, contend
from tests.support.cli_fleet import run, run_json
from tests.support.delta_tables import committer, entry, ids, seq, written

SCHEMA = pa.schema([("id", pa.int64())])
HOUR_MILLIS = 3_600_000


def table(uri, commits=4):
    sink = committer(uri)
    sink.ensure(SCHEMA)
    for turn in range(1, commits + 1):
        sink.land(written(uri, turn), [entry("a", turn, seq(turn - 1))])
    return sink


def age(uri, path, hours):
    then = time.time() - hours * 3_600
    os.utime(Path(uri) / path, (then, then))


@pytest.fixture
def pipeline(tmp_path, monkeypatch):
    """A module with a pipeline whose output table has four files. There are no dead letters."""
    (tmp_path / "upkeep_pipeline.py").write_text(
        "from kcl_pipeline import DeltaSink, KinesisPipeline\n"
        "orders = KinesisPipeline(name='orders', streams=['orders'],\n"
        f"    transform_arrow=lambda r: r, sink=DeltaSink({str(tmp_path / 'table')!r}))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "upkeep_pipeline", raising=False)
    table(str(tmp_path / "table"))
    return "upkeep_pipeline:orders"


def test_compact_shows_and_merges_small_files(pipeline, tmp_path):
    uri = str(tmp_path / "table")
    (found,) = run_json("do", "compact", "-p", pipeline, "--dry-run")["tables"]
    assert (found["files"], found["bytes"] > 0) == (4, True)
    assert "would merge up to 4 files" in run("do", "compact", "-p", pipeline, "--dry-run").stdout
    assert f"{uri}: merged 4 files into 1" in run("do", "compact", "-p", pipeline).stdout
    assert run_json("do", "compact", "-p", pipeline, "--dry-run")["tables"][0]["files"] == 0
    assert ids(uri) == [1, 2, 3, 4]


def test_vacuum_lists_files_and_bytes_and_then_removes_them(pipeline, tmp_path):
    uri = str(tmp_path / "table")
    (forgotten,) = written(uri, 9).files
    age(uri, forgotten.path, 200)
    (found,) = run_json("do", "vacuum", "-p", pipeline, "--dry-run")["tables"]
    assert (found["files"], found["bytes"]) == (1, forgotten.size)
    assert found["paths"] == [forgotten.path]
    text = run("do", "vacuum", "-p", pipeline, "--dry-run").stdout
    assert f"dry run: would remove 1 file ({forgotten.size:,} bytes)" in text
    assert forgotten.path in text
    assert (Path(uri) / forgotten.path).exists()
    text = run("do", "vacuum", "-p", pipeline, "--table", "all").stdout
    assert (
        f"removed 1 file ({forgotten.size:,} bytes) that no version of the last 168 hours" in text
    )
    assert f"{uri}_dead_letters: there is no table" in text
    assert not (Path(uri) / forgotten.path).exists()
    assert ids(uri) == [1, 2, 3, 4]


def test_wrong_arguments_are_one_sentence(pipeline):
    refused = run("do", "vacuum", "-p", pipeline, "--retention-hours", "0", code=1).stderr
    assert "retention_hours=0 is too small" in refused
    assert "write --pipeline module:attribute" in run("do", "compact", code=1).stderr
    run("do", "vacuum", "-p", pipeline, "--table", "none", code=2)


def test_the_dead_letter_table_is_maintained(pipeline, tmp_path):
    uri = f"{tmp_path / 'table'}_dead_letters"
    for number in range(3):
        write_deltalake(uri, pa.table({"id": [number]}), mode="append")
    found = run_json("do", "compact", "-p", pipeline, "--table", "dead-letters")["tables"]
    assert found == [{"table": uri, "removed": 3, "added": 1}]
    assert len(run_json("do", "compact", "-p", pipeline, "--table", "all")["tables"]) == 2


def test_vacuum_keeps_old_files_of_a_batch_that_was_announced_late(tmp_path):
    """A worker that was paused between writing and announcing."""
    uri = str(tmp_path / "table")
    sink = table(uri, commits=1)
    late = written(uri, 2)
    (file,) = late.files
    then = int(time.time() * 1000) - 50 * HOUR_MILLIS
    announce(
        sink,
        [replace(file, modified_millis=then)],
        entry("late", 1),
    )
    age(uri, file.path, 50)
    assert guarded_retention(uri, 2) in (51, 52)
    assert guarded_retention(uri, 168) == 168
    assert vacuum(uri, 2, dry_run=True) == ()
    assert measured_vacuum(uri, 2).retention_hours in (51, 52)
    assert (Path(uri) / file.path).exists()
    contend(sink)
    assert sink.land(written(uri), [entry("own", 1)]).version, "the announced batch lands, too"
    assert ids(uri) == [1, 2]
    forgotten = written(uri, 3).files[0].path
    age(uri, forgotten, 50)
    assert vacuum(uri, 2) == (forgotten,)


def announced_late(uri, clock_millis=0):
    """A file of 50 hours in a new announcement, by a clock that is ahead; its path."""
    sink = table(uri, commits=1)
    (file,) = written(uri, 2).files
    age(uri, file.path, 50)
    then = int((Path(uri) / file.path).stat().st_mtime * 1000) + clock_millis
    announce(
        sink,
        [replace(file, modified_millis=then)],
        entry("late", 1),
    )
    return file.path


@pytest.mark.parametrize("minutes", [-50, 1, 50])
def test_the_clocks_of_writer_and_store_may_differ(tmp_path, minutes):
    uri = str(tmp_path / "table")
    path = announced_late(uri, minutes * 60_000)
    assert vacuum(uri, 2) == ()
    assert (Path(uri) / path).exists()


def test_nothing_is_removed_while_an_announcement_cannot_be_read(tmp_path, monkeypatch):
    """Its files are not known, so none may be removed."""
    uri = str(tmp_path / "table")
    path = announced_late(uri)
    monkeypatch.setattr(local, "_read", fail_to_read)
    with pytest.raises(SinkError, match="could not read the announcements"):
        vacuum(uri, 2)
    assert (Path(uri) / path).exists()


def fail_to_read(name, folder, path, limit):
    raise OSError(5, "Input/output error", path)
