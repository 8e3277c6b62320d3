"""Evaluate the checks that compare the reports of the output: growing lag and dead letters.

The reports are events of Dagster, so a reload of the code loses none.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from kcl_pipeline.orchestration.assets.checks.health import Health
from kcl_pipeline.status.limits import CheckLimits
from kcl_pipeline.text import counted, duration_text

TREND: Final = "lag_not_growing"
DEAD_LETTERS: Final = "no_new_dead_letters"

TREND_ADVICE: Final = (
    "The fleet is slower than its producers. Raise `workers.max` or make the transform faster; if "
    "one shard lags, split it. See docs/checks-and-events.md"
)
DEAD_LETTERS_ADVICE: Final = (
    "The column `error` of the dead-letter table says why, with file and line. Repair the "
    "transform or the producer. See docs/dead-letters.md"
)
REPORTS_ADVICE: Final = (
    "The leader sensor reports it: is the sensor on? See docs/checks-and-events.md"
)
LATE_REPORTS: Final = 3
LEAST_LATE_SECONDS: Final = 180.0
_HOUR_SECONDS: Final = 3_600.0
_MAX_EVENTS: Final = 1_000


@dataclass(frozen=True, slots=True)
class ReportPoint:
    """What one report of the output says.

    Attributes:
        at: Epoch seconds.
        lag_seconds: The largest lag. None: unknown, or the report of a drain.
        dead_letters: Records that became dead letters in the period.
    """

    at: float
    lag_seconds: float | None
    dead_letters: int = 0


def point_of(metadata: Mapping[str, Any], at: float) -> ReportPoint:
    """Return the point of a report with this metadata."""
    lag, dead = _number(metadata, "lag_seconds_max"), _number(metadata, "dead_letters")
    return ReportPoint(at, lag, 0 if dead is None else round(dead))


def _number(metadata: Mapping[str, Any], name: str) -> float | None:
    found = metadata.get(name)
    value = getattr(found, "value", found)
    return float(value) if isinstance(value, int | float) else None


def kept_seconds(limits: CheckLimits, progress_seconds: float) -> float:
    """Return how old a report can be that the checks need."""
    return max(_HOUR_SECONDS, 1.5 * limits.lag_trend_reports * progress_seconds)


def recorded_points(
    instance: dg.DagsterInstance, key: dg.AssetKey, since: float
) -> tuple[ReportPoint, ...]:
    """Return the reports of the output since a time (epoch seconds), oldest first."""
    wanted = dg.AssetRecordsFilter(key, after_timestamp=float(since))
    reports = instance.fetch_materializations(wanted, limit=_MAX_EVENTS).records
    idle = instance.fetch_observations(wanted, limit=_MAX_EVENTS).records
    points = [
        point_of(event.metadata, record.timestamp)
        for record in (*reports, *idle)
        if (event := record.asset_materialization or record.asset_observation) is not None
    ]
    return tuple(sorted(points, key=lambda point: point.at))


def missing_reports(
    points: Sequence[ReportPoint], progress_seconds: float, now: float
) -> str | None:
    """Say that the output has not been reported lately, so that nothing is known; None: it has.

    Args:
        points: The reports.
        progress_seconds: Time between two reports.
        now: Epoch seconds.
    """
    age = now - points[-1].at if points else math.inf
    if age <= max(LATE_REPORTS * progress_seconds, LEAST_LATE_SECONDS):
        return None
    since = "in the last hour" if math.isinf(age) else f"for {duration_text(age)}"
    return f"the output was not reported {since}, so nothing is known. {REPORTS_ADVICE}"


def trend(
    points: Sequence[ReportPoint], limits: CheckLimits, lag_threshold_seconds: float
) -> Health:
    """Whether the lag of the fleet does not grow from report to report.

    It grows if every lag of the newer half of the last reports is larger than every lag of the
    older half. A lag below the threshold of `lag_below_threshold` passes.
    """
    known = [(p.at, p.lag_seconds) for p in points if p.lag_seconds is not None]
    known = known[-limits.lag_trend_reports :]
    if len(known) < limits.lag_trend_reports:
        return Health(
            TREND,
            passed=True,
            description=f"{len(known)} of {limits.lag_trend_reports} reports with a lag so far",
            severity=dg.AssetCheckSeverity.WARN,
        )
    lags = [lag for _, lag in known]
    half = len(lags) // 2
    grows = min(lags[half:]) > max(lags[:half]) and lags[-1] > lag_threshold_seconds
    (began, first), (ended, last) = known[0], known[-1]
    per_minute = 60 * (last - first) / max(ended - began, 1.0)
    text = (
        f"the lag went from {duration_text(first)} to {duration_text(last)} in "
        f"{duration_text(ended - began)}"
    )
    return Health(
        TREND,
        not grows,
        f"{text}: it grows by {per_minute:.0f} s per minute. {TREND_ADVICE}" if grows else text,
        dg.AssetCheckSeverity.WARN,
        {"lag_seconds": last, "growth_seconds_per_minute": round(per_minute, 1)},
    )


def dead_letters(points: Sequence[ReportPoint], limits: CheckLimits, now: float) -> Health:
    """Whether at most `dead_letters_per_hour` records became dead letters in the last hour.

    Args:
        points: The reports.
        limits: The limits.
        now: Epoch seconds.
    """
    count = sum(point.dead_letters for point in points if now - point.at <= _HOUR_SECONDS)
    passed = count <= limits.dead_letters_per_hour
    text = f"{counted(count, 'record')} became dead letters in the last hour"
    return Health(
        DEAD_LETTERS,
        passed,
        text if passed else f"{text}. {DEAD_LETTERS_ADVICE}",
        dg.AssetCheckSeverity.WARN,
        {"dead_letters_last_hour": count},
    )
