"""Define the asset checks that can be executed in the Dagster UI.

The leader sensor reports evaluations under the same names.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import dagster as dg

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
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaseTable, WorkerMetrics
from kcl_pipeline.metrics.exporters import level_of, text_of
from kcl_pipeline.orchestration.assets.access import PipelineResources
from kcl_pipeline.orchestration.assets.checks import (
    health,
    history,
    leadership,
    losses,
    unread,
    worker_runs,
)
from kcl_pipeline.orchestration.assets.checks.hangs import HUNG, hung
from kcl_pipeline.orchestration.assets.checks.lag import observe_lag
from kcl_pipeline.orchestration.assets.checks.living import observe_live_workers
from kcl_pipeline.orchestration.assets.contract import DagsterOptions, PipelineLike
from kcl_pipeline.orchestration.assets.names import Names
from kcl_pipeline.orchestration.assets.pipeline_version import pipeline_version
from kcl_pipeline.orchestration.assets.runs.runs import (
    active_runs,
    last_drain,
    silence_limit_seconds,
)
from kcl_pipeline.text import duration_text

POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Check:
    """One check that can be executed.

    Attributes:
        name: Its name.
        resources: Keys of the resources that an execution needs.
        evaluate: Reads what the check needs, and evaluates it.
        description: What holds if it passes, and how long an execution takes.
    """

    name: str
    resources: set[str]
    evaluate: Callable[[PipelineResources], health.Health]
    description: str


def build_checks(
    pipeline: PipelineLike, names: Names, options: DagsterOptions
) -> list[dg.AssetChecksDefinition]:
    """Build the checks of a pipeline, by the asset that they belong to."""
    checks = _Checks(pipeline, names, options)
    by_asset = {
        names.fleet: [*checks.of_leases(), *checks.of_workers(), *checks.of_leader()],
        names.output: checks.of_output(),
    }
    return [_definition(names, asset, one) for asset, ones in by_asset.items() for one in ones]


def _definition(names: Names, asset: dg.AssetKey, check: Check) -> dg.AssetChecksDefinition:
    @dg.asset_check(
        asset=asset,
        name=check.name,
        description=check.description,
        required_resource_keys=check.resources,
    )
    def execute(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        return check.evaluate(PipelineResources(names, context)).result()

    return execute


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


def _log_event(event: Event) -> None:
    dg.get_dagster_logger().log(level_of(event), text_of(event))


class _Checks:
    """The checks of a pipeline."""

    def __init__(self, pipeline: PipelineLike, names: Names, options: DagsterOptions) -> None:
        self._pipeline = pipeline
        self._settings = pipeline.settings
        self._names = names
        self._options = options
        self._limits = options.check_limits
        self._version = pipeline_version(pipeline)
        self._clock = SystemClock()
        self._rejected = RejectedRows(_log_event)

    def of_leases(self) -> list[Check]:
        clock, lease_resource = self._clock, self._names.leases_resource
        coordinator, workers = self._names.coordinator_resource, self._names.workers_resource
        failover_seconds = self._settings.lease.failover_time_millis / 1000
        age_seconds = self._limits.checkpoint_age_seconds
        return [
            Check(
                health.COVERAGE,
                {lease_resource, coordinator},
                lambda resources: health.coverage(
                    self._listing(resources).leases, self._streams(resources)
                ),
                "The unfinished leases of every stream cover all hash keys, so that every record "
                "is read.",
            ),
            Check(
                health.STUCK,
                {lease_resource},
                lambda resources: health.stuck(
                    find_unrenewed_leases(resources.leases, failover_seconds, clock),
                    failover_seconds / 2,
                ),
                "A worker renews every unfinished lease. An execution observes the leases for the "
                "failover time.",
            ),
            Check(
                unread.CHECKPOINTS,
                {lease_resource, workers},
                lambda resources: unread.observe_checkpoints(
                    resources.leases, resources.workers, age_seconds, clock, self._rejected
                ),
                "The checkpoint of every shard with old unread records changes within "
                f"{duration_text(age_seconds)}. An execution observes those shards for this time "
                "at most, and ends at once if there are none.",
            ),
            Check(
                health.ROWS,
                {lease_resource, workers},
                lambda resources: health.rows(
                    (*self._listing(resources).bad_rows, *resources.workers.scan_workers().bad_rows)
                ),
                "Every row of the lease and worker-metrics tables can be parsed. Other rows are "
                "ignored.",
            ),
            Check(
                health.STREAMS,
                {self._names.aws, coordinator},
                lambda resources: health.streams(
                    find_unavailable_streams(
                        self._kinesis(resources),
                        self._streams(resources),
                        multi_stream=self._settings.is_multi_stream,
                    )
                ),
                "Every stream of the application can be described and listed. Otherwise its "
                "records are not read. The sensor reports it while it or a worker leads.",
            ),
            Check(
                losses.LOSSES,
                {coordinator},
                lambda resources: losses.records_lost(losses.observe_losses(resources.coordinator)),
                "No records were lost, or the number of losses is not above the one that "
                "`kcl-pipeline losses --acknowledge` stored.",
            ),
        ]

    def of_workers(self) -> list[Check]:
        workers = self._names.workers_resource
        return [
            Check(
                health.BALANCE,
                {self._names.leases_resource, workers},
                self._balance,
                "Work is spread evenly over the live workers. An execution waits until all "
                "workers have reported.",
            ),
            Check(
                HUNG,
                {workers},
                lambda resources: hung(self._live_workers(resources)),
                "The processing thread of every worker makes progress while records wait. An "
                "execution waits until all workers have reported.",
            ),
            Check(
                worker_runs.WORKERS,
                {workers},
                lambda resources: worker_runs.observe_worker_runs(
                    self._pipeline,
                    self._names,
                    resources.context.instance,
                    {worker.worker_id for worker in self._live_workers(resources)},
                    self._version,
                    self._clock.wall(),
                ),
                "No run of a worker waits in Dagster's queue for more than a minute, and the runs "
                "do not keep failing within a minute of their start. A new version does not fail. "
                "An execution waits until all workers have reported.",
            ),
        ]

    def of_leader(self) -> list[Check]:
        seconds = self._limits.leader_absent_seconds
        return [
            Check(
                leadership.LEADER,
                {self._names.coordinator_resource},
                lambda resources: leadership.observe_leader(
                    resources.coordinator, seconds, self._clock
                ),
                "A leader renews its lock. An execution observes the lock for "
                f"{duration_text(seconds)} at most.",
            )
        ]

    def of_output(self) -> list[Check]:
        names, limits, threshold = self._names, self._limits, self._options.lag_threshold_seconds
        tables = {names.leases_resource, names.workers_resource, names.coordinator_resource}
        return [
            Check(
                health.LAG,
                tables,
                self._lag,
                f"Every record that arrived more than {duration_text(threshold)} ago is in the "
                "table, and no shard is stalled. The severity is ERROR above "
                f"{duration_text(limits.lag_error_seconds)}. An execution waits until all workers "
                "have reported.",
            ),
            Check(
                health.PAUSED,
                {names.workers_resource},
                lambda resources: health.paused(self._live_workers(resources)),
                "No shard is paused because its transform fails, or because the table was replaced "
                "or restored. An execution waits until all workers have reported.",
            ),
            Check(
                unread.RETENTION,
                {names.aws, *tables},
                self._retention,
                "No unread record leaves the retention period of its stream within "
                f"{duration_text(limits.retention_warn_seconds)}. The severity is ERROR below "
                f"{duration_text(limits.retention_error_seconds)}. The sensor reports it after it "
                "has led. An execution waits until all workers have reported.",
            ),
            Check(
                history.TREND,
                set(),
                self._of_reports(
                    history.TREND, lambda points, _: history.trend(points, limits, threshold)
                ),
                "The largest lag does not grow. Compared are the last "
                f"{limits.lag_trend_reports} reports of the output.",
            ),
            Check(
                history.DEAD_LETTERS,
                set(),
                self._of_reports(
                    history.DEAD_LETTERS,
                    lambda points, now: history.dead_letters(points, limits, now),
                ),
                f"At most {limits.dead_letters_per_hour} records became dead letters in the last "
                "hour.",
            ),
        ]

    def _live_workers(self, resources: PipelineResources) -> tuple[WorkerMetrics, ...]:
        limit = silence_limit_seconds(self._settings)
        return observe_live_workers(resources.workers, limit, self._clock, self._rejected)

    def _listing(self, resources: PipelineResources) -> LeaseListing:
        table, multi_stream = resources.leases, self._settings.is_multi_stream
        return table.list_leases().of_form(table.name, multi_stream=multi_stream)

    def _kinesis(self, resources: PipelineResources) -> KinesisClient:
        return open_kinesis(self._settings, resources.aws.clients(self._settings), self._clock)

    def _streams(self, resources: PipelineResources) -> tuple[str, ...]:
        return all_streams(self._settings, resources.coordinator)

    def _balance(self, resources: PipelineResources) -> health.Health:
        workers = self._live_workers(resources)
        threshold = self._settings.assignment.re_balance_threshold_percentage
        return health.balance(resources.leases.list_leases().leases, workers, threshold)

    def _lag(self, resources: PipelineResources) -> health.Health:
        instance, application = resources.context.instance, self._names.application
        separator = self._settings.worker.worker_group_separator
        return observe_lag(
            resources.leases,
            resources.workers,
            active_runs(instance, application, separator),
            drained_at=last_drain(instance, application),
            pause=resources.coordinator.read_control().pause,
            threshold_seconds=self._options.lag_threshold_seconds,
            error_seconds=self._limits.lag_error_seconds,
            silence_seconds=silence_limit_seconds(self._settings),
            clock=self._clock,
            rejected=self._rejected,
        )

    def _retention(self, resources: PipelineResources) -> health.Health:
        kinesis, multi_stream = self._kinesis(resources), self._settings.is_multi_stream
        streams = []
        for name in self._streams(resources):
            with suppress(*STREAM_ERRORS):  # streams_available reports it
                streams.append(kinesis.resolve_stream(name, multi_stream=multi_stream))
        workers, leases = self._live_workers(resources), resources.leases.list_leases().leases
        drained_at = last_drain(resources.context.instance, self._names.application)
        ages = unread.unread_seconds(leases, workers, self._clock.wall(), drained_at)
        return unread.retention(leases, ages, unread.retention_by_stream(streams), self._limits)

    def _of_reports(
        self,
        check: str,
        evaluate: Callable[[tuple[history.ReportPoint, ...], float], health.Health],
    ) -> Callable[[PipelineResources], health.Health]:
        """Return the evaluation of a check that fails if the output was not reported lately."""

        def evaluated(resources: PipelineResources) -> health.Health:
            now, period = self._clock.wall(), self._options.progress_seconds
            since = now - history.kept_seconds(self._limits, period)
            points = history.recorded_points(resources.context.instance, self._names.output, since)
            missing = history.missing_reports(points, period, now)
            if missing is not None:
                return health.Health(check, False, missing, dg.AssetCheckSeverity.WARN)
            return evaluate(points, now)

        return evaluated
