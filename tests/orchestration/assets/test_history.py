"""The checks that compare the reports of the output."""

from __future__ import annotations

import dagster as dg
import pytest

from kcl_pipeline.orchestration.assets.checks.history import (
    DEAD_LETTERS_ADVICE,
    TREND_ADVICE,
    ReportPoint,
    dead_letters,
    kept_seconds,
    point_of,
    recorded_points,
    trend,
)
from kcl_pipeline.status.limits import CheckLimits

KEY = dg.AssetKey(["orders", "events"])
LIMITS = CheckLimits()


def points(*lags: float | None, dead: int = 0) -> list[ReportPoint]:
    return [ReportPoint(60.0 * number, lag, dead) for number, lag in enumerate(lags)]


@pytest.mark.parametrize(
    ("lags", "passed"),
    [
        ([10.0 * n for n in range(10)], False),
        ([5.0 * n for n in range(10)], True),
        ([100.0 - n for n in range(10)], True),
        ([100.0, 90.0, 120.0, 80.0, 110.0] * 2, True),
        ([300.0] * 10, True),
        ([100.0, 90.0, 95.0, 99.0, 98.0, 101.0, 130.0, 110.0, 140.0, 120.0], False),
        ([0.0, 900.0, *[10.0 * n for n in range(10)]], False),
    ],
)
def test_a_lag_grows_if_the_newer_half_is_above_the_older_half(lags, passed):
    verdict = trend(points(*lags), LIMITS, 60.0)
    assert verdict.passed is passed
    assert verdict.severity is dg.AssetCheckSeverity.WARN
    assert verdict.description.endswith(f". {TREND_ADVICE}") is not passed


def test_the_growth_is_named():
    verdict = trend(points(*[60.0 * n for n in range(10)]), LIMITS, 60.0)
    assert verdict.description.startswith(
        "the lag went from 0 s to 9 min in 9 min: it grows by 60 s per minute. "
    )
    assert verdict.metadata["growth_seconds_per_minute"] == 60.0


def test_too_few_reports_pass():
    few = points(*[60.0 * n for n in range(9)], None)
    verdict = trend(few, LIMITS, 60.0)
    assert verdict.passed
    assert verdict.description == "9 of 10 reports with a lag so far"
    assert not trend(few, CheckLimits(lag_trend_reports=4), 60.0).passed


def test_dead_letters_of_the_last_hour_are_counted():
    found = [ReportPoint(0.0, None, 50), ReportPoint(400.0, 1.0, 3), ReportPoint(500.0, 1.0, 4)]
    verdict = dead_letters(found, LIMITS, 3_700.0)
    assert not verdict.passed
    assert verdict.description == (
        f"7 records became dead letters in the last hour. {DEAD_LETTERS_ADVICE}"
    )
    assert dead_letters(found, CheckLimits(dead_letters_per_hour=7), 3_700.0).passed
    assert dead_letters(found, LIMITS, 4_101.0).passed
    assert dead_letters([], LIMITS, 0.0).passed


def test_the_reports_are_read_from_dagster():
    with dg.DagsterInstance.ephemeral() as instance:
        for event in (
            dg.AssetMaterialization(KEY, metadata={"lag_seconds_max": 2.5, "dead_letters": 3}),
            dg.AssetObservation(KEY, metadata={"lag_seconds_max": 4, "dead_letters": 0}),
            dg.AssetMaterialization(KEY, metadata={"dead_letters": 2, "lag": "5 s"}),
        ):
            instance.report_runless_asset_event(event)
        found = recorded_points(instance, KEY, 0)
        assert [(one.lag_seconds, one.dead_letters) for one in found] == [
            (2.5, 3),
            (4.0, 0),
            (None, 2),
        ]
        assert recorded_points(instance, KEY, found[-1].at + 60) == ()


def test_a_point_of_metadata_that_is_not_stored_yet():
    metadata = {"lag_seconds_max": dg.MetadataValue.float(1.5), "dead_letters": 2}
    assert point_of(metadata, 7.0) == ReportPoint(7.0, 1.5, 2)


def test_reports_are_kept_for_an_hour_or_as_long_as_the_trend_needs():
    assert kept_seconds(LIMITS, 60.0) == 3_600.0
    assert kept_seconds(LIMITS, 600.0) == 9_000.0
