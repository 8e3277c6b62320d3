"""The asset checks with a button; the leader sensor reports evaluations under the same names."""

from typing import Any

import dagster as dg

from kcl_pipeline.assets import health
from kcl_pipeline.assets.contract import DagsterOptions, PipelineLike
from kcl_pipeline.assets.names import Names
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.leases.tables import LeaseTable, WorkerMetricsTable
from kcl_pipeline.sensors.reconcile import silence_limit_seconds
from kcl_pipeline.sensors.runs import active_runs, worst_lag_millis

LOOK_SECONDS = 1.0


def watch_leases(table: LeaseTable, seconds: float, clock: Clock) -> dict[str, float]:
    """Leases that are unfinished and have nobody who renews them, by looking for so many seconds; returns how long each was seen so.

    A renewal is seen as a counter that moves. A lease that is renewed or finished at any look is not among them.
    """
    begin = clock.monotonic()
    suspects = {lease.lease_key: lease.counter for lease in table.list_leases().leases if not lease.ended}
    while suspects and clock.monotonic() - begin < seconds:
        clock.sleep(LOOK_SECONDS)
        now = {lease.lease_key: lease for lease in table.list_leases().leases if not lease.ended}
        suspects = {key: counter for key, counter in suspects.items() if key in now and (now[key].counter == counter or now[key].actual_owner is None)}
    return dict.fromkeys(suspects, clock.monotonic() - begin)


def living_workers(table: WorkerMetricsTable, seconds: float, clock: Clock) -> tuple[Any, ...]:
    """Workers whose row moves within so many seconds of looking."""
    begin = clock.monotonic()
    first = {row.worker_id: row for row in table.list_workers()}
    living: dict[str, Any] = {}
    while len(living) < len(first) and clock.monotonic() - begin < seconds:
        clock.sleep(LOOK_SECONDS)
        rows = table.list_workers()
        living |= {row.worker_id: row for row in rows if first.get(row.worker_id) != row}
    return tuple(living[key] for key in sorted(living))


def build_checks(pipeline: PipelineLike, names: Names, options: DagsterOptions, clock: Clock | None = None) -> list[dg.AssetChecksDefinition]:
    """Hash-range coverage and stuck leases on the lease table, balance on the worker-metrics table, lag on the output."""
    clock = clock or SystemClock()
    settings = pipeline.settings

    @dg.asset_check(
        asset=names.lease_table,
        name=health.COVERAGE,
        description="The unfinished leases of every stream cover all hash keys: no record can be missed.",
        required_resource_keys={names.leases_resource},
    )
    def hash_ranges_covered(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        table = getattr(context.resources, names.leases_resource).table()
        return health.coverage(table.list_leases().leases, settings.streams).result()

    @dg.asset_check(
        asset=names.lease_table,
        name=health.STUCK,
        description="Every unfinished lease is renewed by somebody. The button looks for as long as a lease lasts.",
        required_resource_keys={names.leases_resource},
    )
    def leases_renewed(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        table = getattr(context.resources, names.leases_resource).table()
        seconds = settings.lease.failover_time_millis / 1000
        return health.stuck(watch_leases(table, seconds, clock), seconds / 2).result()

    @dg.asset_check(
        asset=names.worker_metrics_table,
        name=health.BALANCE,
        description="Work is spread evenly over the living workers. The button looks until all have reported.",
        required_resource_keys={names.leases_resource, names.workers_resource},
    )
    def balanced(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        workers = living_workers(getattr(context.resources, names.workers_resource).table(), silence_limit_seconds(settings), clock)
        leases = getattr(context.resources, names.leases_resource).table().list_leases().leases
        return health.balance(leases, workers, settings.assignment.re_balance_threshold_percentage).result()

    @dg.asset_check(
        asset=names.output,
        name=health.LAG,
        description=f"No running worker is more than {options.lag_threshold_seconds:.0f} s behind the tip of its shards.",
    )
    def lag_below_threshold(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        runs = active_runs(context.instance, names.application, settings.worker.worker_group_separator)
        return health.lag(worst_lag_millis(runs), options.lag_threshold_seconds).result()

    return [hash_ranges_covered, leases_renewed, balanced, lag_below_threshold]
