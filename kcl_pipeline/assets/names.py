"""Names that Dagster shows or stores: asset keys, job and sensor names, resource keys, run tags,
worker ids.
"""

import re
from dataclasses import dataclass

from dagster import AssetKey

from kcl_pipeline.assets.contract import PipelineLike

APPLICATION_TAG = "kcl/application"
MODE_TAG = "kcl/mode"
WORKER_TAG = "kcl/worker"
LAG_TAG = "kcl/lag_millis"
LAG_AT_TAG = "kcl/lag_reported_at"
STALLED_TAG = "kcl/stalled_shards"
PAUSED_TAG = "kcl/paused_shards"
CONTINUOUS = "continuous"
DRAIN = "drain"

_NOT_PYTHON = re.compile(r"[^A-Za-z0-9_]")


def python_name(text: str) -> str:
    """`text` with every character that Dagster does not take in a name replaced by an
    underscore.
    """
    name = _NOT_PYTHON.sub("_", text)
    return f"_{name}" if name[:1].isdigit() else name


def stream_name(name_or_arn: str) -> str:
    """The bare name of a stream that is given by name or ARN."""
    return name_or_arn.rsplit("/", 1)[-1] if name_or_arn.startswith("arn:") else name_or_arn


def stream_key(name_or_arn: str) -> AssetKey:
    """The asset of a stream: the same for all pipelines that read it, so that their lineages
    meet.
    """
    return AssetKey(["kinesis", stream_name(name_or_arn)])


def table_uri(sink: object) -> str | None:
    """The address of the sink's table; None for a sink that is no table."""
    uri = getattr(sink, "uri", None)
    return str(uri) if uri else None


def dead_letter_uri(sink: object) -> str | None:
    """The address of the sink's dead-letter table; None for a sink that has none."""
    uri = getattr(sink, "dead_letters", None) or getattr(sink, "dead_letter_uri", None)
    return str(uri) if uri else None


def worker_id_of(application: str, run_id: str, separator: str = "-") -> str:
    """The worker of a run: the group (what stands before the first separator) is the application,
    the rest is unique per run.
    """
    return f"{application.replace(separator, '_')}{separator}{run_id[:8]}"


@dataclass(frozen=True, slots=True)
class Names:
    """All names of one pipeline."""

    application: str
    streams: tuple[str, ...]
    table: str

    @classmethod
    def of(cls, pipeline: PipelineLike) -> "Names":
        """Derived from the pipeline; the output is called after the last part of the table's
        address.
        """
        uri = table_uri(pipeline.sink) or "output"
        return cls(
            pipeline.name, tuple(pipeline.settings.streams), uri.rstrip("/").rsplit("/", 1)[-1]
        )

    @property
    def prefix(self) -> str:
        """The application as a Python name."""
        return python_name(self.application)

    @property
    def output(self) -> AssetKey:
        """What the workers write."""
        return AssetKey([self.application, self.table])

    @property
    def lease_table(self) -> AssetKey:
        """The lease table."""
        return AssetKey([self.application, "lease_table"])

    @property
    def worker_metrics_table(self) -> AssetKey:
        """The worker-metrics table."""
        return AssetKey([self.application, "worker_metrics_table"])

    @property
    def coordinator_state_table(self) -> AssetKey:
        """The coordinator-state table."""
        return AssetKey([self.application, "coordinator_state_table"])

    @property
    def streams_keys(self) -> tuple[AssetKey, ...]:
        """The streams."""
        return tuple(stream_key(s) for s in self.streams)

    @property
    def consume_job(self) -> str:
        """The job that one worker is a run of."""
        return f"{self.prefix}_consume"

    @property
    def maintenance_job(self) -> str:
        """The job that compacts and vacuums the output."""
        return f"{self.prefix}_maintenance"

    @property
    def leader_sensor(self) -> str:
        """The leader."""
        return f"{self.prefix}_leader"

    @property
    def aws(self) -> str:
        """Resource key; resources carry the pipeline's name, so that several pipelines merge into
        one code location.
        """
        return f"{self.prefix}_aws"

    @property
    def leases_resource(self) -> str:
        """Resource key."""
        return f"{self.prefix}_lease_table"

    @property
    def workers_resource(self) -> str:
        """Resource key."""
        return f"{self.prefix}_worker_metrics_table"

    @property
    def coordinator_resource(self) -> str:
        """Resource key."""
        return f"{self.prefix}_coordinator_state_table"

    @property
    def spark(self) -> str:
        """Resource key."""
        return f"{self.prefix}_spark"
