"""`kcl-pipeline dead-letters`, and what `doctor` says about the table."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from kcl_pipeline.cli.doctor.dead_letters import check_dead_letters
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.status.findings import FindingLevel
from tests.delta.test_replayed import letters, marked
from tests.support.cli_fleet import run, run_json
from tests.support.delta_tables import dead_letter_table

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A dead-letter table with two records, and a module with its pipeline."""
    sink = DeltaSink(str(tmp_path / "orders"))
    made = dead_letter_table(sink.dead_letters)
    made.append(letters(1, 2, at=NOON))
    monkeypatch.setitem(sys.modules, "my_pipeline", SimpleNamespace(it=SimpleNamespace(sink=sink)))
    return sink.dead_letters


def test_counts_and_marks(table: str) -> None:
    counted = {"total": 2, "not_replayed": 2, "last_hour": 0, "marked": None}
    assert run_json("dead-letters", "-p", "my_pipeline:it") == counted
    assert "2 dead letters, 2 not replayed" in run("dead-letters", "--uri", table).stdout
    options = ("--mark-replayed", "--failed-before", "2026-01-01T12:00:01Z")
    assert run_json("dead-letters", "-p", "my_pipeline:it", *options) == {
        "total": 2,
        "not_replayed": 0,
        "last_hour": 0,
        "marked": 2,
    }
    assert None not in marked(table).values()
    again = run("dead-letters", "--uri", table, *options, "--lease-key", "s-1", "--batch-id", "b")
    assert "0 records marked as replayed" in again.stdout


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "write either --pipeline module:attribute or --uri ADDRESS"),
        (("--uri", "TABLE", "--mark-replayed"), "--failed-before is missing"),
        (("--uri", "TABLE", "--lease-key", "s-1"), "add --mark-replayed"),
        (
            ("--uri", "TABLE", "--mark-replayed", "--failed-before", "noon"),
            "'noon' is no time with a time zone",
        ),
        (
            ("--uri", "TABLE", "--mark-replayed", "--failed-before", "2026-01-01T12:00:00"),
            "is no time with a time zone",
        ),
    ],
)
def test_wrong_options_change_nothing(table: str, options: tuple[str, ...], text: str) -> None:
    given = [table if one == "TABLE" else one for one in options]
    assert text in " ".join(run("dead-letters", *given, code=1).stderr.split())
    assert set(marked(table).values()) == {None}


def test_a_sink_without_a_table_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_pipeline", SimpleNamespace(it=SimpleNamespace(sink=None)))
    text = run("dead-letters", "-p", "my_pipeline:it", code=1).stderr
    assert "has no dead-letter table; set its dead_letter_uri" in " ".join(text.split())


def test_doctor_reports_count_growth_and_a_table_that_cannot_be_read(
    table: str, tmp_path: Path
) -> None:
    clock = SystemClock()
    (none,) = check_dead_letters(str(tmp_path / "none"), {}, clock)
    assert (none.level, "no table" in none.sentence) == (FindingLevel.OK, True)
    now = datetime.fromtimestamp(clock.wall(), UTC)
    worker = dead_letter_table(table)
    worker.append(letters(3, at=now))
    (some,) = check_dead_letters(table, {}, clock)
    assert some.level is FindingLevel.WARNING
    assert "3 records" in some.sentence
    assert "3 not replayed; it grew by 1 in the last hour" in some.sentence
    run(
        "dead-letters", "--uri", table, "--mark-replayed", "--failed-before", "9999-01-01T00:00:00Z"
    )
    (done,) = check_dead_letters(table, {}, clock)
    assert (done.level, "0 not replayed" in done.sentence) == (FindingLevel.OK, True)
    for file in Path(table).rglob("*.parquet"):
        file.write_bytes(b"broken")
    (broken,) = check_dead_letters(table, {}, clock)
    assert broken.level is FindingLevel.PROBLEM
    assert "cannot be read" in broken.sentence
