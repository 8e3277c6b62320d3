"""Derive the names that Dagster shows or stores from a pipeline.

These are asset keys, job and sensor names, resource keys, run tags and worker ids.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import dagster as dg
from dagster import AssetKey

from kcl_pipeline.errors import SettingsError
from kcl_pipeline.foreach import ForeachBatchSink
from kcl_pipeline.leases.coordinator import CoordinatorStateTable
from kcl_pipeline.leases.workers import WorkerMetricsTable
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.orchestration.options import DagsterOptions, PipelineLike, SessionFactory
from kcl_pipeline.orchestration.resources import AwsResource
from kcl_pipeline.pipeline.arguments import INVALID_IN_KEY, output_path
from kcl_pipeline.settings_errors import wrong
from kcl_pipeline.signals import SignalHandlers
from kcl_pipeline.status.streams import account_of, stream_name

APPLICATION_TAG = "kcl/application"
MODE_TAG = "kcl/mode"
DRAINED_TAG = "kcl/drained_at"
"""When a drain had all records in the table that it found, and no other worker held a lease."""
REPLAY_TAG = "kcl/replay"
VERSION_TAG = "kcl/version"
READ_TAG = "kcl/read"
LANDED_TAG = "kcl/landed"
HANDED_OVER_TAG = "kcl/handed_over"
"""The totals of a worker. They are tags, because the page of a run shows these at its top."""
REPLACES_TAG = "kcl/replaces"
"""Id of the worker that the worker of a run replaces."""
REPOSITORY_TAG = ".dagster/repository"
"""Dagster sets it on a run of the Dagster UI: `<repository>@<code location>`."""
LOCATION_TAG = "dagster/code_location"
"""Dagster sets it on a run of a sensor: the code location."""
CONTINUOUS: Final = "continuous"
DRAIN: Final = "drain"
MAX_RETRIES_TAG = "dagster/max_retries"
MAX_RUNTIME_TAG = "dagster/max_runtime"
UNLIMITED = "0"
"""The maximum runtime that Dagster's run monitoring never applies."""

_INVALID_CHARACTER = re.compile(r"[^A-Za-z0-9_]")


def python_name(text: str) -> str:
    """Replace every character that Dagster does not allow in a name by an underscore."""
    name = _INVALID_CHARACTER.sub("_", text)
    return f"_{name}" if name[:1].isdigit() else name


def stream_keys(streams: Iterable[str]) -> dict[str, AssetKey]:
    """The asset keys of the streams of one pipeline, by name or ARN.

    All pipelines that read a stream share its asset, so that Dagster draws one lineage. The key has
    the account, too, if an earlier stream has the same name.
    """
    keys: dict[str, AssetKey] = {}
    for one in streams:
        key = AssetKey(["kinesis", stream_name(one)])
        if key in keys.values() and one not in keys:
            key = AssetKey(["kinesis", account_of(one) or "other", stream_name(one)])
        keys.setdefault(one, key)
    return keys


def partition_key(key: AssetKey) -> str:
    """The partition of a stream with this asset key in the asset of the streams."""
    # Dagster does not allow three full stops.
    return ".".join(key.path[1:]).replace("...", "_")


def table_uri(sink: object) -> str | None:
    """The address of the sink's table; None for a sink that is not a table."""
    uri = getattr(sink, "uri", None)
    return str(uri) if uri else None


def has_frames(pipeline: PipelineLike) -> bool:
    """Whether a function of the user gets a Spark DataFrame."""
    return pipeline.transform is not None or isinstance(pipeline.sink, ForeachBatchSink)


def uses_spark(pipeline: PipelineLike) -> bool:
    """Whether a worker may need a Spark session: for frames, or to fetch on executors."""
    by_executors = pipeline.settings.retrieval.fetch_on == "executors"
    return has_frames(pipeline) or by_executors or bool(pipeline.spark_config)


def worker_id_of(application: str, run_id: str, separator: str = "-") -> str:
    """The worker id of a run.

    The worker group (the part before the first separator) is the application. The rest is unique
    per run.
    """
    return f"{application.replace(separator, '_')}{separator}{run_id[:8]}"


def output_key(pipeline: PipelineLike) -> AssetKey:
    """The asset key of the output.

    Without a given one: the application and the last part of the table's address, with underscores
    for characters that Dagster does not allow.
    """
    given = output_path(pipeline.output_asset_key)
    if given is not None:
        return AssetKey(given)
    folder = (table_uri(pipeline.sink) or "output").rstrip("/").rsplit("/", 1)[-1]
    return AssetKey([pipeline.name, INVALID_IN_KEY.sub("_", folder) or "output"])


@dataclass(frozen=True, slots=True)
class Names:
    """All names of one pipeline.

    Resource keys contain the pipeline's name, so that one code location can have several pipelines.

    Attributes:
        application: The application.
        prefix: The application as a Python name.
        streams: Names or ARNs of the streams in the settings.
        streams_keys: Asset keys of these streams.
        selects_streams: Whether the streams are selected at run time.
        selected_streams: Asset key of the streams that are selected at run time, one partition per
            stream.
        stream_partitions: Name of the dynamic partitions of `selected_streams`.
        output: Asset key of the output.
        fleet: Asset key of the fleet: leases, workers and leader.
        consume_job: Name of the job whose runs are workers.
        operate_job: Name of the job of an operator.
        leader_sensor: Name of the leader sensor.
        aws: Resource key of the AWS session.
        spark: Resource key of the Spark session. None: the pipeline uses none.
        leases_resource: Resource key of the lease table.
        workers_resource: Resource key of the worker-metrics table.
        coordinator_resource: Resource key of the coordinator-state table.
    """

    application: str
    prefix: str
    streams: tuple[str, ...]
    streams_keys: tuple[AssetKey, ...]
    selects_streams: bool
    selected_streams: AssetKey
    stream_partitions: str
    output: AssetKey
    fleet: AssetKey
    consume_job: str
    operate_job: str
    leader_sensor: str
    aws: str
    spark: str | None
    leases_resource: str
    workers_resource: str
    coordinator_resource: str

    @classmethod
    def of(cls, pipeline: PipelineLike) -> "Names":
        """Derive the names of a pipeline."""
        name, prefix, settings = pipeline.name, python_name(pipeline.name), pipeline.settings
        return cls(
            application=name,
            prefix=prefix,
            streams=tuple(settings.streams),
            streams_keys=tuple(stream_keys(settings.streams).values()),
            selects_streams=settings.selects_streams,
            selected_streams=AssetKey([name, "streams"]),
            stream_partitions=f"{prefix}_streams",
            output=output_key(pipeline),
            fleet=AssetKey([name, "fleet"]),
            consume_job=f"{prefix}_consume",
            operate_job=f"{prefix}_operate",
            leader_sensor=f"{prefix}_leader",
            aws=f"{prefix}_aws",
            spark=f"{prefix}_spark" if uses_spark(pipeline) else None,
            leases_resource=f"{prefix}_lease_table",
            workers_resource=f"{prefix}_worker_metrics_table",
            coordinator_resource=f"{prefix}_coordinator_state_table",
        )

    def with_resources(self, options: DagsterOptions) -> "Names":
        """Return the names with the keys of those resources that the user has already."""
        aws, spark = options.aws, options.spark
        own = self.spark if spark is None else f"{self.prefix}_spark"
        return replace(
            self,
            aws=aws if isinstance(aws, str) else self.aws,
            spark=spark if isinstance(spark, str) else own,
        )

    def check_keys(self, *, is_derived: bool) -> None:
        """Check that no two assets of the pipeline have one key.

        Args:
            is_derived: Whether the key of the output is derived, and not given.

        Raises:
            SettingsError: Two have. Dagster would report a dependency of an asset on itself, or
                merge them without a word.
        """
        streams = dict.fromkeys(self.streams_keys, "a stream")
        if self.selects_streams:
            streams[self.selected_streams] = "the selected streams"
        if self.fleet in streams:
            raise SettingsError(
                f"the application {self.application!r} has a stream and its fleet with the asset "
                f"key {self.fleet.to_user_string()}. Write another name of the pipeline."
            )
        other = "the fleet" if self.output == self.fleet else streams.get(self.output)
        if other is not None:
            how = "derived from the address of the table" if is_derived else "output_asset_key"
            raise SettingsError(
                f"the asset key {self.output.to_user_string()} of the output ({how}) is that of "
                f"{other}. Write another output_asset_key, such as ['lake', 'events']."
            )

    @property
    def sessions(self) -> set[str]:
        """Resource keys of the AWS session and the Spark session."""
        return {self.aws} if self.spark is None else {self.aws, self.spark}

    @property
    def pool(self) -> str:
        """Pool of the op that is a worker. Its limit keeps places for other runs."""
        return f"kcl_{self.prefix}"

    @property
    def worker_run_tags(self) -> dict[str, str]:
        """Tags of the runs of continuous workers.

        The sensor replaces failed workers, so Dagster must not retry them. Run monitoring must not
        terminate them, also if `run_monitoring.max_runtime_seconds` is set: a worker goes on until
        its successor reads.
        """
        return {
            APPLICATION_TAG: self.application,
            MODE_TAG: CONTINUOUS,
            MAX_RETRIES_TAG: "0",
            MAX_RUNTIME_TAG: UNLIMITED,
        }


# Give assets, sensors and ops typed access to the resources of one pipeline.

Context = (
    dg.AssetCheckExecutionContext
    | dg.AssetExecutionContext
    | dg.OpExecutionContext
    | dg.SensorEvaluationContext
)
"""The Dagster contexts that have resources."""


@dataclass(frozen=True, slots=True)
class PipelineResources:
    """The resources of one pipeline in a context.

    Their keys contain the pipeline's name. They are therefore not fixed attributes of a class.
    """

    names: Names
    context: Context

    @property
    def aws(self) -> AwsResource:
        """The AWS session."""
        return aws_of(self.context.resources, self.names.aws)

    def session_factory(self, signals: SignalHandlers) -> SessionFactory | None:
        """Return what opens the Spark session. None: `build_session`, if the worker needs one."""
        if self.names.spark is None:
            return None
        spark = self._find(self.names.spark)
        from kcl_pipeline.orchestration.spark import open_session  # noqa: PLC0415 (it is slow)

        return signals.reinstalled_after(lambda: open_session(spark))

    @property
    def leases(self) -> LeaseTable:
        """The lease table."""
        return cast("LeaseTable", self._find(self.names.leases_resource).table())

    @property
    def workers(self) -> WorkerMetricsTable:
        """The worker-metrics table."""
        return cast("WorkerMetricsTable", self._find(self.names.workers_resource).table())

    @property
    def coordinator(self) -> CoordinatorStateTable:
        """The coordinator-state table."""
        return cast("CoordinatorStateTable", self._find(self.names.coordinator_resource).table())

    def _find(self, key: str) -> Any:
        return getattr(self.context.resources, key)


def aws_of(resources: object, key: str) -> AwsResource:
    """Return the AWS session at a key of the resources.

    Raises:
        SettingsError: The resource is another one.
    """
    found = getattr(resources, key)
    if not hasattr(found, "clients"):
        problem = f"is the key of a {type(found).__name__}, not of an AwsResource"
        raise wrong("aws", key, problem, "Write the key of an AwsResource, or AwsResource(...)")
    return cast("AwsResource", found)
