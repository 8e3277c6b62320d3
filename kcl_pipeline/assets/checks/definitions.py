"""Define the asset checks that can be executed in the Dagster UI.

The leader sensor reports evaluations under the same names.
"""

from collections.abc import Iterable
from contextlib import suppress

import dagster as dg

from kcl_pipeline.assets.access import PipelineResources
from kcl_pipeline.assets.checks import health
from kcl_pipeline.assets.checks.hangs import HUNG, hung
from kcl_pipeline.assets.checks.history_definitions import build_history_checks
from kcl_pipeline.assets.checks.lag import observe_lag
from kcl_pipeline.assets.checks.living import observe_live_workers
from kcl_pipeline.assets.checks.losses import LOSSES, observe_losses, records_lost
from kcl_pipeline.assets.checks.observing import build_observing_checks
from kcl_pipeline.assets.checks.unread import (
    RETENTION,
    retention,
    retention_by_stream,
    unread_seconds,
)
from kcl_pipeline.assets.checks.worker_runs import build_worker_run_check
from kcl_pipeline.assets.contract import DagsterOptions, PipelineLike
from kcl_pipeline.assets.limits import CheckLimits
from kcl_pipeline.assets.names import Names
from kcl_pipeline.assets.runs.runs import active_runs, last_drain, silence_limit_seconds
from kcl_pipeline.aws import open_kinesis
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import STREAM_ERRORS
from kcl_pipeline.events import Event
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leases.application.recorded_stream import streams_to_read
from kcl_pipeline.leases.lease.rejected import RejectedRows
from kcl_pipeline.leases.lease.values import LeaseListing
from kcl_pipeline.leases.state.worker_status import UnavailableStream
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaseTable
from kcl_pipeline.metrics.exporters import level_of, text_of
from kcl_pipeline.text import duration_text

POLL_SECONDS = 1.0


def find_unrenewed_leases(table: LeaseTable, seconds: float, clock: Clock) -> dict[str, float]:
    """Find unfinished leases that are not renewed during the given time.

    A renewal changes the lease counter. A lease that is renewed or finished in this time is not
    returned.

    Returns:
        By lease key, for how many seconds the lease was observed without a renewal.
    """
    begin = clock.monotonic()
    suspects = {
        lease.lease_key: lease.counter for lease in table.list_leases().leases if not lease.ended
    }
    while suspects and clock.monotonic() - begin < seconds:
        clock.sleep(POLL_SECONDS)
        now = {lease.lease_key: lease for lease in table.list_leases().leases if not lease.ended}
        suspects = {
            key: counter
            for key, counter in suspects.items()
            if key in now and (now[key].counter == counter or now[key].actual_owner is None)
        }
    return dict.fromkeys(suspects, clock.monotonic() - begin)


def find_unavailable_streams(
    kinesis: KinesisClient, names: Iterable[str], *, multi_stream: bool
) -> tuple[UnavailableStream, ...]:
    """Describe and list every stream, and return those that are missing or forbidden.

    Raises:
        AwsError: A call was throttled, or the service cannot be reached.
    """
    found: list[UnavailableStream] = []
    for name in names:
        try:
            kinesis.list_shards(kinesis.resolve_stream(name, multi_stream=multi_stream))
        except STREAM_ERRORS as error:
            found.append(UnavailableStream(name, str(error)))
    return tuple(found)


def all_streams(settings: ConsumerSettings, table: CoordinatorStateTable) -> tuple[str, ...]:
    """Return names or ARNs: the streams of the settings and the other recorded ones.

    Raises:
        UnreadableRowError: The record cannot be read.
        AwsError: The call failed.
    """
    multi_stream = settings.is_multi_stream
    record = table.read_application() if multi_stream else None
    return streams_to_read(
        settings.streams,
        () if record is None else record.identity.streams,
        is_multi_stream=multi_stream,
    )


def build_checks(
    pipeline: PipelineLike, names: Names, options: DagsterOptions
) -> list[dg.AssetChecksDefinition]:
    """Build the checks of a pipeline.

    Hash-range coverage, stuck leases, checkpoints, usable rows, available streams and lost records
    belong to the lease table, balance and hung workers to the worker-metrics table, the leader to
    the coordinator-state table, and lag, retention, paused shards and dead letters to the output.
    """
    clock = SystemClock()
    rejected = RejectedRows(_log_event)
    return [
        *_table_checks(pipeline.settings, names, clock, rejected),
        _stream_check(pipeline.settings, names, clock),
        _loss_check(names),
        _hung_check(pipeline.settings, names, clock, rejected),
        *_output_checks(pipeline.settings, names, options, clock, rejected),
        _retention_check(pipeline.settings, names, options.check_limits, clock, rejected),
        *build_observing_checks(names, options.check_limits, clock, rejected),
        *build_history_checks(names, options, clock),
        build_worker_run_check(pipeline, names, clock, rejected),
    ]


def _log_event(event: Event) -> None:
    dg.get_dagster_logger().log(level_of(event), text_of(event))


def _table_checks(
    settings: ConsumerSettings, names: Names, clock: Clock, rejected: RejectedRows
) -> list[dg.AssetChecksDefinition]:
    def usable_leases(table: LeaseTable) -> LeaseListing:
        return table.list_leases().of_form(table.name, multi_stream=settings.is_multi_stream)

    @dg.asset_check(
        asset=names.lease_table,
        name=health.COVERAGE,
        description="The unfinished leases of every stream cover all hash keys, so that every "
        "record is read.",
        required_resource_keys={names.leases_resource, names.coordinator_resource},
    )
    def hash_ranges_covered(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        resources = PipelineResources(names, context)
        streams = all_streams(settings, resources.coordinator)
        return health.coverage(usable_leases(resources.leases).leases, streams).result()

    @dg.asset_check(
        asset=names.lease_table,
        name=health.STUCK,
        description="A worker renews every unfinished lease. An execution observes the leases "
        "for the failover time.",
        required_resource_keys={names.leases_resource},
    )
    def leases_renewed(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        table = PipelineResources(names, context).leases
        seconds = settings.lease.failover_time_millis / 1000
        return health.stuck(find_unrenewed_leases(table, seconds, clock), seconds / 2).result()

    @dg.asset_check(
        asset=names.worker_metrics_table,
        name=health.BALANCE,
        description="Work is spread evenly over the live workers. An execution waits until all "
        "workers have reported.",
        required_resource_keys={names.leases_resource, names.workers_resource},
    )
    def balanced(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        workers = observe_live_workers(
            PipelineResources(names, context).workers,
            silence_limit_seconds(settings),
            clock,
            rejected,
        )
        leases = PipelineResources(names, context).leases.list_leases().leases
        return health.balance(
            leases, workers, settings.assignment.re_balance_threshold_percentage
        ).result()

    @dg.asset_check(
        asset=names.lease_table,
        name=health.ROWS,
        description="Every row of the lease and worker-metrics tables can be parsed. Other "
        "rows are ignored.",
        required_resource_keys={names.leases_resource, names.workers_resource},
    )
    def rows_usable(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        leases = usable_leases(PipelineResources(names, context).leases)
        workers = PipelineResources(names, context).workers.scan_workers()
        return health.rows((*leases.bad_rows, *workers.bad_rows)).result()

    return [hash_ranges_covered, leases_renewed, balanced, rows_usable]


def _stream_check(
    settings: ConsumerSettings, names: Names, clock: Clock
) -> dg.AssetChecksDefinition:
    @dg.asset_check(
        asset=names.lease_table,
        name=health.STREAMS,
        description="Every stream of the application can be described and listed. Otherwise its "
        "records are not read. The sensor reports it while it or a worker leads.",
        required_resource_keys={names.aws, names.coordinator_resource},
    )
    def streams_available(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        resources, multi_stream = PipelineResources(names, context), settings.is_multi_stream
        wanted = all_streams(settings, resources.coordinator)
        kinesis = open_kinesis(settings, resources.aws.clients(settings), clock)
        return health.streams(
            find_unavailable_streams(kinesis, wanted, multi_stream=multi_stream)
        ).result()

    return streams_available


def _retention_check(
    settings: ConsumerSettings,
    names: Names,
    limits: CheckLimits,
    clock: Clock,
    rejected: RejectedRows,
) -> dg.AssetChecksDefinition:
    @dg.asset_check(
        asset=names.output,
        name=RETENTION,
        description="No unread record leaves the retention period of its stream within "
        f"{duration_text(limits.retention_warn_seconds)}. The severity is ERROR below "
        f"{duration_text(limits.retention_error_seconds)}. The sensor reports it after it has led. "
        "An execution waits until all workers have reported.",
        required_resource_keys={
            names.aws,
            names.leases_resource,
            names.workers_resource,
            names.coordinator_resource,
        },
    )
    def data_within_retention(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        resources, multi_stream = PipelineResources(names, context), settings.is_multi_stream
        kinesis = open_kinesis(settings, resources.aws.clients(settings), clock)
        streams = []
        for name in all_streams(settings, resources.coordinator):
            with suppress(*STREAM_ERRORS):  # streams_available reports it
                streams.append(kinesis.resolve_stream(name, multi_stream=multi_stream))
        limit = silence_limit_seconds(settings)
        workers = observe_live_workers(resources.workers, limit, clock, rejected)
        leases = resources.leases.list_leases().leases
        drained_at = last_drain(context.instance, names.application)
        unread = unread_seconds(leases, workers, clock.wall(), drained_at)
        return retention(leases, unread, retention_by_stream(streams), limits).result()

    return data_within_retention


def _loss_check(names: Names) -> dg.AssetChecksDefinition:
    @dg.asset_check(
        asset=names.lease_table,
        name=LOSSES,
        description="No records were lost, or a person has acknowledged every loss with "
        "`kcl-pipeline losses --acknowledge`.",
        required_resource_keys={names.coordinator_resource},
    )
    def no_records_lost(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return records_lost(observe_losses(PipelineResources(names, context).coordinator)).result()

    return no_records_lost


def _hung_check(
    settings: ConsumerSettings, names: Names, clock: Clock, rejected: RejectedRows
) -> dg.AssetChecksDefinition:
    @dg.asset_check(
        asset=names.worker_metrics_table,
        name=HUNG,
        description="The processing thread of every worker makes progress while records wait. An "
        "execution waits until all workers have reported.",
        required_resource_keys={names.workers_resource},
    )
    def no_worker_hung(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        table = PipelineResources(names, context).workers
        limit = silence_limit_seconds(settings)
        return hung(observe_live_workers(table, limit, clock, rejected)).result()

    return no_worker_hung


def _output_checks(
    settings: ConsumerSettings,
    names: Names,
    options: DagsterOptions,
    clock: Clock,
    rejected: RejectedRows,
) -> list[dg.AssetChecksDefinition]:
    limits = options.check_limits

    @dg.asset_check(
        asset=names.output,
        name=health.LAG,
        description="Every record that arrived more than "
        f"{duration_text(options.lag_threshold_seconds)} ago is in the table, and no shard is "
        f"stalled. The severity is ERROR above {duration_text(limits.lag_error_seconds)}. An "
        "execution waits until all workers have reported.",
        required_resource_keys={
            names.leases_resource,
            names.workers_resource,
            names.coordinator_resource,
        },
    )
    def lag_below_threshold(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        resources, instance = PipelineResources(names, context), context.instance
        pause = resources.coordinator.read_control().pause
        separator = settings.worker.worker_group_separator
        return observe_lag(
            resources.leases,
            resources.workers,
            active_runs(instance, names.application, separator),
            drained_at=last_drain(instance, names.application),
            pause=None if pause is None else pause.sentence,
            threshold_seconds=options.lag_threshold_seconds,
            error_seconds=limits.lag_error_seconds,
            silence_seconds=silence_limit_seconds(settings),
            clock=clock,
            rejected=rejected,
        ).result()

    @dg.asset_check(
        asset=names.output,
        name=health.PAUSED,
        description="No shard is paused because its transform fails, or because the table was "
        "replaced or restored. An execution waits until all workers have reported.",
        required_resource_keys={names.workers_resource},
    )
    def no_shard_paused(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        table = PipelineResources(names, context).workers
        limit = silence_limit_seconds(settings)
        return health.paused(observe_live_workers(table, limit, clock, rejected)).result()

    return [lag_below_threshold, no_shard_paused]
