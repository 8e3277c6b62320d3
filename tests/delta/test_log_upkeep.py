"""Log checkpoints are made by another thread, and no commit waits for them."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.support.delta_tables import Committer, committer, entry, ids, seq, upkeep_ended, written

SCHEMA = pa.schema([("id", pa.int64())])
DEADLINE_SECONDS = 30.0


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "table")


def table(uri: str, interval: str = "5") -> Committer:
    sink = committer(uri, table_properties={"delta.checkpointInterval": interval})
    sink.ensure(SCHEMA)
    return sink


def commit(sink: Committer, uri: str, *turns: int) -> None:
    for turn in turns:
        one = entry("a", turn, seq(turn - 1))
        assert sink.land(written(uri, turn), [one]).version is not None


def checkpoints(uri: str) -> set[int]:
    found = (Path(uri) / "_delta_log").glob("*.checkpoint.parquet")
    return {int(file.name[:20]) for file in found}


def test_commits_go_on_while_a_checkpoint_is_written(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, go_on = table(uri), threading.Event()
    create = DeltaTable.create_checkpoint

    def slow(self: DeltaTable) -> None:
        assert go_on.wait(DEADLINE_SECONDS)
        create(self)

    monkeypatch.setattr(DeltaTable, "create_checkpoint", slow)
    commit(sink, uri, *range(1, 9))
    assert checkpoints(uri) == set()
    assert not upkeep_ended(sink.delta_log, 0)
    go_on.set()
    assert upkeep_ended(sink.delta_log, DEADLINE_SECONDS)
    assert checkpoints(uri) == {5}
    commit(sink, uri, 9)
    assert ids(uri) == list(range(1, 10))


def test_the_newest_request_is_kept_while_another_one_runs(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, begun, go_on = table(uri, "2"), threading.Event(), threading.Event()
    create = DeltaTable.create_checkpoint

    def slow(self: DeltaTable) -> None:
        begun.set()
        assert go_on.wait(DEADLINE_SECONDS)
        create(self)

    monkeypatch.setattr(DeltaTable, "create_checkpoint", slow)
    commit(sink, uri, 1, 2)
    assert begun.wait(DEADLINE_SECONDS)
    commit(sink, uri, *range(3, 8))
    go_on.set()
    assert upkeep_ended(sink.delta_log, DEADLINE_SECONDS)
    assert checkpoints(uri) == {2, 6}


def test_a_failure_is_logged_and_the_next_request_works(
    uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = table(uri)
    with monkeypatch.context() as patched:
        patched.setattr(
            DeltaTable, "create_checkpoint", lambda _self: (_ for _ in ()).throw(OSError("full"))
        )
        commit(sink, uri, *range(1, 6))
        assert upkeep_ended(sink.delta_log, DEADLINE_SECONDS)
    assert "full; the log grows until the next attempt" in caplog.text
    commit(sink, uri, *range(6, 11))
    assert upkeep_ended(sink.delta_log, DEADLINE_SECONDS)
    assert checkpoints(uri) == {10}
