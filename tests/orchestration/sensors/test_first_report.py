"""The report of the output comes with the first rows, then once a minute."""

from __future__ import annotations

from kcl_pipeline.orchestration.reports import FleetTotals
from tests.orchestration.sensors.test_output_report import row


def reports(batches: list[int]) -> list[int]:
    """Seconds of the reports, when a worker's number of batches is read every five seconds."""
    totals, due = FleetTotals(), []
    for tick, count in enumerate(batches):
        now = 5.0 * tick
        totals.observe([row("w", "1", 10 * count, now)], now)
        if totals.is_due(now, 60.0):
            totals.close_period(now)
            due.append(round(now))
    return due


def test_the_first_rows_are_reported_at_once_and_then_once_a_minute():
    assert reports([0, 0, 0, *range(1, 30)]) == [15, 75, 135]


def test_the_first_rows_after_a_report_without_rows_are_reported_at_once():
    assert reports([0] * 20 + [1] * 20) == [60, 100, 160]
