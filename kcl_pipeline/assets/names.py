"""Derive the names that Dagster shows or stores from a pipeline.

These are asset keys, job and sensor names, resource keys, run tags and worker ids.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dagster import AssetKey

from kcl_pipeline.arguments import check_texts
from kcl_pipeline.assets.contract import PipelineLike
from kcl_pipeline.batch import dead_letter_address
from kcl_pipeline.settings_errors import wrong

APPLICATION_TAG = "kcl/application"
MODE_TAG = "kcl/mode"
WORKER_TAG = "kcl/worker"
LAG_TAG = "kcl/lag_millis"
LAG_AT_TAG = "kcl/lag_reported_at"
DRAINED_TAG = "kcl/drained_at"
"""When a drain had all records in the table that it found, and no other worker held a lease."""
STALLED_TAG = "kcl/stalled_shards"
PAUSED_TAG = "kcl/paused_shards"
REPLAY_TAG = "kcl/replay"
VERSION_TAG = "kcl/version"
REFUSED_TAG = "kcl/refused"
"""Why the sensor has ended a worker of a new version. No other worker of the version follows."""
REPOSITORY_TAG = ".dagster/repository"
"""Dagster sets it on a run of the Dagster UI: `<repository>@<code location>`."""
LOCATION_TAG = "dagster/code_location"
"""Dagster sets it on a run of a sensor: the code location."""
CONTINUOUS = "continuous"
DRAIN = "drain"
MAX_RETRIES_TAG = "dagster/max_retries"
MAX_RUNTIME_TAG = "dagster/max_runtime"
UNLIMITED = "0"
"""The maximum runtime that Dagster's run monitoring never applies."""

_INVALID_CHARACTER = re.compile(r"[^A-Za-z0-9_]")
_INVALID_IN_KEY = re.compile(r"[^A-Za-z0-9_.-]")


def python_name(text: str) -> str:
    """Replace every character that Dagster does not allow in a name by an underscore."""
    name = _INVALID_CHARACTER.sub("_", text)
    return f"_{name}" if name[:1].isdigit() else name


def stream_name(name_or_arn: str) -> str:
    """The name of a stream that is given by name or ARN."""
    return name_or_arn.rsplit("/", 1)[-1] if name_or_arn.startswith("arn:") else name_or_arn


def stream_key(name_or_arn: str) -> AssetKey:
    """The asset key of a stream.

    All pipelines that read the stream share this asset, so that Dagster draws one lineage.
    """
    return AssetKey(["kinesis", stream_name(name_or_arn)])


def stream_keys(streams: Iterable[str]) -> dict[str, AssetKey]:
    """The asset keys of the streams of one pipeline, by name or ARN.

    The key has the account, too, if an earlier stream has the same name.
    """
    keys: dict[str, AssetKey] = {}
    for one in streams:
        key = stream_key(one)
        if key in keys.values() and one not in keys:
            key = AssetKey(["kinesis", _account_of(one) or "other", stream_name(one)])
        keys.setdefault(one, key)
    return keys


def _account_of(name_or_arn: str) -> str | None:
    parts = name_or_arn.split(":")
    return parts[4] if name_or_arn.startswith("arn:") and len(parts) > 4 else None  # noqa: PLR2004


def partition_key(key: AssetKey) -> str:
    """The partition of a stream with this asset key in the asset of the streams."""
    # Dagster does not allow three full stops.
    return ".".join(key.path[1:]).replace("...", "_")


def is_lease_stream(name_or_arn: str, serialized: str, others: Iterable[str]) -> bool:
    """Whether the stream of a lease (`account:name:epoch`) is the one with this name or ARN.

    A name without an account is not a stream that `others` has by its ARN.
    """
    account, _, rest = serialized.partition(":")
    if rest.rpartition(":")[0] != stream_name(name_or_arn):
        return False
    own = _account_of(name_or_arn)
    if own is not None:
        return own == account
    name = stream_name(name_or_arn)
    return account not in {_account_of(one) for one in others if stream_name(one) == name}


def table_uri(sink: object) -> str | None:
    """The address of the sink's table; None for a sink that is not a table."""
    uri = getattr(sink, "uri", None)
    return str(uri) if uri else None


def dead_letter_uri(sink: object) -> str | None:
    """The address of the sink's dead-letter table; None for a sink without one."""
    return dead_letter_address(sink)


def worker_id_of(application: str, run_id: str, separator: str = "-") -> str:
    """The worker id of a run.

    The worker group (the part before the first separator) is the application. The rest is unique
    per run.
    """
    return f"{application.replace(separator, '_')}{separator}{run_id[:8]}"


def output_key(given: AssetKey | Sequence[str] | str | None) -> AssetKey | None:
    """The asset key that a user gave for the output.

    Raises:
        SettingsError: It is not a key, or Dagster does not allow its characters.
    """
    if given is None:
        return None
    parts = given.path if isinstance(given, AssetKey) else given
    if isinstance(parts, str):
        parts = parts.split("/")
    advice = "Write ['lake', 'orders'], 'lake/orders' or an AssetKey"
    check_texts("output_asset_key", parts, advice)
    if not parts or any(_INVALID_IN_KEY.search(part) for part in parts):
        raise wrong(
            "output_asset_key",
            "/".join(parts),
            "is not an asset key of the characters A-Z a-z 0-9 _ . -",
            advice,
        )
    return AssetKey(list(parts))


@dataclass(frozen=True, slots=True)
class Names:
    """All names of one pipeline."""

    application: str
    streams: tuple[str, ...]
    output: AssetKey
    selects_streams: bool = False

    @classmethod
    def of(cls, pipeline: PipelineLike, output: AssetKey | None = None) -> "Names":
        """Derive the names.

        Args:
            pipeline: The pipeline.
            output: Asset key of the output. None: the application and the last part of the
                table's address, with underscores for characters that Dagster does not allow.
        """
        if output is None:
            uri = table_uri(pipeline.sink) or "output"
            folder = uri.rstrip("/").rsplit("/", 1)[-1]
            output = AssetKey([pipeline.name, _INVALID_IN_KEY.sub("_", folder) or "output"])
        settings = pipeline.settings
        return cls(pipeline.name, tuple(settings.streams), output, settings.selects_streams)

    @property
    def prefix(self) -> str:
        """The application as a Python name."""
        return python_name(self.application)

    @property
    def lease_table(self) -> AssetKey:
        """Asset key of the lease table."""
        return AssetKey([self.application, "lease_table"])

    @property
    def worker_metrics_table(self) -> AssetKey:
        """Asset key of the worker-metrics table."""
        return AssetKey([self.application, "worker_metrics_table"])

    @property
    def coordinator_state_table(self) -> AssetKey:
        """Asset key of the coordinator-state table."""
        return AssetKey([self.application, "coordinator_state_table"])

    @property
    def streams_keys(self) -> tuple[AssetKey, ...]:
        """Asset keys of the streams in the settings."""
        return tuple(stream_keys(self.streams).values())

    @property
    def selected_streams(self) -> AssetKey:
        """Asset key of the streams that are selected at run time, one partition per stream."""
        return AssetKey([self.application, "streams"])

    @property
    def stream_partitions(self) -> str:
        """Name of the dynamic partitions of `selected_streams`."""
        return f"{self.prefix}_streams"

    @property
    def consume_job(self) -> str:
        """Name of the job whose runs are workers."""
        return f"{self.prefix}_consume"

    @property
    def worker_run_tags(self) -> dict[str, str]:
        """Tags of the runs of continuous workers.

        The sensor replaces failed workers, so Dagster must not retry them. Run monitoring must not
        terminate them, also if `run_monitoring.max_runtime_seconds` is set.
        """
        return {
            APPLICATION_TAG: self.application,
            MODE_TAG: CONTINUOUS,
            MAX_RETRIES_TAG: "0",
            MAX_RUNTIME_TAG: UNLIMITED,
        }

    @property
    def maintenance_job(self) -> str:
        """Name of the job that compacts and vacuums the output."""
        return f"{self.prefix}_maintenance"

    def operator_job(self, operation: str) -> str:
        """Name of the job of an operator, such as `pause`."""
        return f"{self.prefix}_{operation}"

    @property
    def leader_sensor(self) -> str:
        """Name of the leader sensor."""
        return f"{self.prefix}_leader"

    @property
    def aws(self) -> str:
        """Resource key of the AWS session.

        Resource keys contain the pipeline's name, so that one code location can have several
        pipelines.
        """
        return f"{self.prefix}_aws"

    @property
    def leases_resource(self) -> str:
        """Resource key of the lease table."""
        return f"{self.prefix}_lease_table"

    @property
    def workers_resource(self) -> str:
        """Resource key of the worker-metrics table."""
        return f"{self.prefix}_worker_metrics_table"

    @property
    def coordinator_resource(self) -> str:
        """Resource key of the coordinator-state table."""
        return f"{self.prefix}_coordinator_state_table"

    @property
    def spark(self) -> str:
        """Resource key of the Spark session."""
        return f"{self.prefix}_spark"
