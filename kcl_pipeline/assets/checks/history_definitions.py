"""Define the asset checks that compare the reports of the output."""

import dagster as dg

from kcl_pipeline.assets.checks.history import (
    DEAD_LETTERS,
    TREND,
    ReportPoint,
    dead_letters,
    kept_seconds,
    recorded_points,
    trend,
)
from kcl_pipeline.assets.contract import DagsterOptions
from kcl_pipeline.assets.names import Names
from kcl_pipeline.clock import Clock


def build_history_checks(
    names: Names, options: DagsterOptions, clock: Clock
) -> list[dg.AssetChecksDefinition]:
    """Build the checks of the lag's trend and of dead letters. They read Dagster's events only."""
    limits = options.check_limits

    def points(instance: dg.DagsterInstance) -> tuple[ReportPoint, ...]:
        kept = kept_seconds(limits, options.progress_seconds)
        return recorded_points(instance, names.output, clock.wall() - kept)

    @dg.asset_check(
        asset=names.output,
        name=TREND,
        description="The largest lag does not grow. Compared are the last "
        f"{limits.lag_trend_reports} reports of the output.",
    )
    def lag_not_growing(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return trend(points(context.instance), limits, options.lag_threshold_seconds).result()

    @dg.asset_check(
        asset=names.output,
        name=DEAD_LETTERS,
        description=f"At most {limits.dead_letters_per_hour} records became dead letters in the "
        "last hour.",
    )
    def no_new_dead_letters(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return dead_letters(points(context.instance), limits, clock.wall()).result()

    return [lag_not_growing, no_new_dead_letters]
