"""Percentiles of recent commits, with time that only the test moves."""

from __future__ import annotations

from kcl_pipeline.worker.status import RECENT_SECONDS, RecentBatches
from tests.support.dagster_fakes import ManualClock


def test_without_a_batch_nothing_is_known():
    recent = RecentBatches(ManualClock())
    assert recent.last_age_seconds() is None
    assert recent.percentiles_99() == (None, None)


def test_percentiles_cover_the_last_five_minutes_and_the_age_is_of_the_last_batch():
    clock = ManualClock()
    recent = RecentBatches(clock)
    recent.note(9_000.0, [90_000.0])
    clock.advance(RECENT_SECONDS + 1)
    for _ in range(3):
        recent.note(100.0, [500.0, 700.0])
        clock.advance(10)
    commit, put_to_commit = recent.percentiles_99()
    assert commit == 100
    assert put_to_commit is not None
    assert 500 < put_to_commit <= 700
    assert recent.last_age_seconds() == 10.0
    clock.advance(RECENT_SECONDS)
    assert recent.percentiles_99() == (None, None)
    assert recent.last_age_seconds() == 10.0 + RECENT_SECONDS


def test_memory_is_bounded():
    clock = ManualClock()
    recent = RecentBatches(clock)
    for number in range(3_000):
        recent.note(float(number), [float(wait) for wait in range(2_000)])
    assert len(recent._batches) == 1_000
    assert len(recent._batches[0].waits) <= 100
