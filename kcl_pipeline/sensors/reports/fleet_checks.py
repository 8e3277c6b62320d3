"""Evaluate all checks of one observation of the application."""

import dagster as dg

from kcl_pipeline.assets.checks import health, history, unread
from kcl_pipeline.assets.checks.hangs import hung
from kcl_pipeline.assets.checks.lag import lag
from kcl_pipeline.assets.checks.losses import records_lost
from kcl_pipeline.assets.contract import DagsterOptions
from kcl_pipeline.assets.names import Names
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.sensors.reports.fleet_view import FleetView

Check = tuple[dg.AssetKey, health.Health]


def stuck_limit_seconds(settings: ConsumerSettings) -> float:
    """After how long a lease without a live owner is stuck.

    Twice the sum of the failover time, the assignment interval and the discovery interval.
    """
    millis = (
        settings.lease.failover_time_millis
        + settings.lease_assignment_interval_millis
        + settings.lease_discovery_interval_millis
    )
    return 2 * millis / 1000


def fleet_checks(
    view: FleetView, names: Names, settings: ConsumerSettings, options: DagsterOptions
) -> list[Check]:
    """Return the checks whose input is known, with the assets that they belong to."""
    return [
        *((names.output, check) for check in _data_checks(view, options)),
        *((names.lease_table, check) for check in _lease_checks(view, settings, options)),
        (names.worker_metrics_table, hung(view.workers)),
        (
            names.worker_metrics_table,
            health.balance(
                view.leases, view.workers, settings.assignment.re_balance_threshold_percentage
            ),
        ),
    ]


def _data_checks(view: FleetView, options: DagsterOptions) -> list[health.Health]:
    limits = options.check_limits
    checks = [health.paused(view.workers)]
    behind = lag(view.lag, options.lag_threshold_seconds, limits.lag_error_seconds)
    if behind is not None:
        checks.append(behind)
    if view.retention_seconds:
        checks.append(
            unread.retention(view.leases, view.unread_seconds, view.retention_seconds, limits)
        )
    if view.points is not None:
        checks += [
            history.trend(view.points, limits, options.lag_threshold_seconds),
            history.dead_letters(view.points, limits, view.wall_seconds),
        ]
    return checks


def _lease_checks(
    view: FleetView, settings: ConsumerSettings, options: DagsterOptions
) -> list[health.Health]:
    checks = [
        health.coverage(view.leases, view.streams or settings.streams),
        health.stuck(view.waits, stuck_limit_seconds(settings)),
        unread.checkpoints(
            view.leases,
            view.checkpoint_seconds,
            view.unread_seconds,
            options.check_limits.checkpoint_age_seconds,
        ),
        health.rows(view.bad_rows),
        records_lost(view.losses),
    ]
    if view.unavailable is not None:
        checks.append(health.streams(view.unavailable))
    return checks
