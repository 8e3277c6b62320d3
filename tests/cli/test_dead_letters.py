"""What `doctor` says about the dead-letter table."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from kcl_pipeline.cli.doctor.sink import check_dead_letters
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.dead_letters import mark_replayed
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.status.findings import FindingLevel
from tests.delta.test_replayed import letters
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
    far = datetime(9999, 1, 1, tzinfo=UTC)
    assert mark_replayed(table, {}, failed_before=far, replayed_at=now) == 3
    (done,) = check_dead_letters(table, {}, clock)
    assert (done.level, "0 not replayed" in done.sentence) == (FindingLevel.OK, True)
    for file in Path(table).rglob("*.parquet"):
        file.write_bytes(b"broken")
    (broken,) = check_dead_letters(table, {}, clock)
    assert broken.level is FindingLevel.PROBLEM
    assert "cannot be read" in broken.sentence
