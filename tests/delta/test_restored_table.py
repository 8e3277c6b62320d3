"""A Delta `RESTORE` under an application: it is reported once, and no row lands twice."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.events import Event, TableRestored
from kcl_pipeline.position import Position
from tests.support.delta_tables import NOTHING, commit_entries, entry_of

KEY = "arn:aws:kinesis:eu-west-1:1:stream/s/17/a"
OTHER = "arn:aws:kinesis:eu-west-1:1:stream/s/17/b"
SCHEMA = pa.schema([pa.field("n", pa.int64())])


class Application:
    """One worker of an application that writes to the table."""

    def __init__(self, folder: Path, name: str = "app") -> None:
        self.events: list[Event] = []
        self.sink = DeltaCommitter(DeltaSink(str(folder)), name, events=self.events.append)
        self.sink.ensure(SCHEMA)

    def commit(self, end: int, key: str = KEY) -> None:
        known = self.sink.positions([key])
        entry = entry_of(key, known.shards[key], Position(str(end)))
        outcome = commit_entries(self.sink, known.table_id, NOTHING, [entry])
        assert outcome.version is not None

    def number(self, key: str = KEY) -> int:
        return self.sink.positions([key]).shards[key].number

    @property
    def restored(self) -> list[tuple[int, str]]:
        events = [event for event in self.events if isinstance(event, TableRestored)]
        table_id = self.sink.positions([]).table_id
        assert all(event.table_id == table_id for event in events)
        return [(event.version, event.restored_to) for event in events]


def restore(folder: Path, target: int | datetime) -> int:
    table = DeltaTable(str(folder))
    table.restore(target)
    return DeltaTable(str(folder)).version()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "table"


def test_a_restore_under_a_running_worker_is_reported_once(folder: Path) -> None:
    app = Application(folder)
    for end in (1, 2, 3):
        app.commit(end)
    version = restore(folder, 1)
    app.commit(4)
    app.commit(5)
    assert app.restored == [(version, "version 1")]
    assert app.number() == 5, "a RESTORE moves no position"


def test_each_restore_is_reported(folder: Path) -> None:
    app = Application(folder)
    versions = []
    for end in (1, 3):
        app.commit(end)
        app.commit(end + 1)
        versions.append(restore(folder, 1))
    app.number()
    assert [version for version, _ in app.restored] == versions


def test_a_worker_that_starts_later_reports_it(folder: Path) -> None:
    Application(folder).commit(1)
    version = restore(folder, 0)
    later = Application(folder)
    later.number()
    assert later.restored == [(version, "version 0")]


def test_a_worker_that_had_not_looked_at_its_shards_reports_it(folder: Path) -> None:
    Application(folder).commit(1)
    app = Application(folder)
    assert app.sink.positions([]).table_id is not None
    version = restore(folder, 0)
    app.sink.positions([])
    app.number()
    assert app.restored == [(version, "version 0")]


def test_a_restore_to_a_time_names_the_time(folder: Path) -> None:
    app = Application(folder)
    app.commit(1)
    at = datetime(2026, 11, 26, 10, tzinfo=UTC)
    for entry in (folder / "_delta_log").glob("*.json"):
        os.utime(entry, (at.timestamp(), at.timestamp()))
    app.commit(2)
    restore(folder, at)
    app.number()
    ((_, restored_to),) = app.restored
    assert restored_to == "the version of 2026-11-26T10:00:00.000+00:00"


@pytest.mark.parametrize("is_open", [True, False])
def test_a_restore_before_the_first_commit_is_none_of_its_business(
    folder: Path, is_open: bool
) -> None:
    other = Application(folder, "other")
    other.commit(1)
    app = Application(folder) if is_open else None
    if app is not None:
        assert app.number() == 0
    version = restore(folder, 0)
    app = app or Application(folder)
    app.commit(1)
    app.commit(1, OTHER)
    assert app.restored == []
    other.commit(2)
    assert other.restored == [(version, "version 0")]


def test_other_changes_of_the_table_are_not_reported(folder: Path) -> None:
    app = Application(folder)
    app.commit(1)
    rows = pa.table({"n": [1]}, schema=SCHEMA)
    write_deltalake(str(folder), rows, mode="append")
    DeltaTable(str(folder)).optimize.compact()
    app.commit(2)
    assert app.restored == []


@pytest.mark.parametrize(
    ("info", "to"),
    [
        ({"operation": "RESTORE"}, "an unknown version"),
        ({"operation": "RESTORE", "operationParameters": {"version": 7}}, "version 7"),
        (
            {
                "operation": "RESTORE",
                "operationParameters": {"version": None, "timestamp": "2026-11-26 10:00:00"},
            },
            "the version of 2026-11-26 10:00:00",
        ),
        (
            {"operation": "RESTORE", "operationParameters": {"version": "\x1b[2J"}},
            "version \\x1b[2J",
        ),
        ({"operation": "RESTORE", "operationParameters": 5}, None),
        ({"operation": ["RESTORE"]}, None),
        ({"operation": "WRITE", "userMetadata": '"RESTORE"'}, None),
        (None, None),
    ],
)
def test_what_other_writers_say_is_only_shown(folder: Path, info: object, to: str | None) -> None:
    app = Application(folder)
    app.commit(1)
    version = DeltaTable(str(folder)).version() + 1
    entry = folder / "_delta_log" / f"{version:020d}.json"
    entry.write_text(json.dumps({"commitInfo": info}) + "\n")
    app.commit(2)
    assert app.restored == ([] if to is None else [(version, to)])
    assert app.number() == 2
