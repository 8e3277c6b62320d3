"""Define the asset checks that compare the reports of the output."""

from collections.abc import Callable

import dagster as dg

from kcl_pipeline.assets.checks.health import Health
from kcl_pipeline.assets.checks.history import (
    DEAD_LETTERS,
    TREND,
    ReportPoint,
    dead_letters,
    kept_seconds,
    missing_reports,
    recorded_points,
    trend,
    without_reports,
)
from kcl_pipeline.assets.contract import DagsterOptions
from kcl_pipeline.assets.names import Names
from kcl_pipeline.clock import Clock


def build_history_checks(
    names: Names, options: DagsterOptions, clock: Clock
) -> list[dg.AssetChecksDefinition]:
    """Build the checks of the lag's trend and of dead letters. They read Dagster's events only."""
    limits = options.check_limits

    def evaluated(
        instance: dg.DagsterInstance,
        check: str,
        evaluate: Callable[[tuple[ReportPoint, ...], float], Health],
    ) -> dg.AssetCheckResult:
        now, kept = clock.wall(), kept_seconds(limits, options.progress_seconds)
        points = recorded_points(instance, names.output, now - kept)
        missing = missing_reports(points, options.progress_seconds, now)
        found = evaluate(points, now) if missing is None else without_reports(check, missing)
        return found.result()

    @dg.asset_check(
        asset=names.output,
        name=TREND,
        description="The largest lag does not grow. Compared are the last "
        f"{limits.lag_trend_reports} reports of the output.",
    )
    def lag_not_growing(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return evaluated(
            context.instance,
            TREND,
            lambda points, _: trend(points, limits, options.lag_threshold_seconds),
        )

    @dg.asset_check(
        asset=names.output,
        name=DEAD_LETTERS,
        description=f"At most {limits.dead_letters_per_hour} records became dead letters in the "
        "last hour.",
    )
    def no_new_dead_letters(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return evaluated(
            context.instance,
            DEAD_LETTERS,
            lambda points, now: dead_letters(points, limits, now),
        )

    return [lag_not_growing, no_new_dead_letters]
