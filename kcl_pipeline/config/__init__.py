"""The settings of a consumer, with KCL's names in snake_case.

Defaults are those of KCL unless the description names KCL's value (protocol §13). A unit is the
last part of a name. No setting is read from the environment.
"""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kcl_pipeline.config.assignment import AssignmentSettings
from kcl_pipeline.config.metrics import MetricsSettings
from kcl_pipeline.config.model import (
    STREAM_FORMS,
    StrictSettings,
    is_stream,
    names_stream,
    stream_of_consumer,
)
from kcl_pipeline.config.retrieval import RetrievalSettings
from kcl_pipeline.config.shard_sync import InitialPosition, ShardSyncSettings, StreamSettings
from kcl_pipeline.config.worker import WorkerSettings
from kcl_pipeline.shards import StreamId

__all__ = [
    "MAX_LOCK_DURATION_MILLIS",
    "AssignmentSettings",
    "BatchSettings",
    "ConsumerSettings",
    "InitialPosition",
    "LeaderSettings",
    "LeaseSettings",
    "MetricsSettings",
    "RetrievalSettings",
    "ShardSyncSettings",
    "StreamSettings",
    "TableSettings",
    "WorkerSettings",
]

_DISCOVERY_MILLIS: Final = 2_000
_RECORD_MEMORY_BYTES: Final = 512 * 1024 * 1024
MAX_LOCK_DURATION_MILLIS: Final = 600_000
"""Longest duration of the leader lock, in settings and in the lock row.

Our own limit; KCL's default is two minutes. An unreadable lock row is taken over when it has not
changed for this time.
"""


class TableSettings(StrictSettings):
    """How one DynamoDB table is created (protocol §1.1).

    An existing table is not changed, except for point-in-time recovery.
    """

    table_name: str | None = Field(
        None, min_length=3, max_length=255, description="None: derived from the application name"
    )
    billing_mode: Literal["PAY_PER_REQUEST", "PROVISIONED"] = Field(
        "PAY_PER_REQUEST", description="PAY_PER_REQUEST: on-demand capacity"
    )
    read_capacity_units: int = Field(10, ge=1, description="Only with billing_mode PROVISIONED")
    write_capacity_units: int = Field(10, ge=1, description="Only with billing_mode PROVISIONED")
    point_in_time_recovery_enabled: bool = Field(
        False, description="Backups of the last 35 days, also for an existing table"
    )
    deletion_protection_enabled: bool = Field(
        False, description="DynamoDB refuses to delete the table"
    )
    tags: dict[str, str] = Field(
        default_factory=dict,
        json_schema_extra={"write": "a dictionary of strings, such as {'team': 'orders'}"},
        description="Tags of the table",
    )


class LeaseSettings(StrictSettings):
    """Duration, renewal, discovery and handoff of leases (protocol §6.1, §6.5)."""

    failover_time_millis: int = Field(
        10_000, ge=100, description="A lease whose counter has not moved for this long is expired"
    )
    epsilon_millis: int = Field(
        25, ge=0, description="The renewal interval is a third of the failover time, less this"
    )
    lease_discovery_interval_millis: int | None = Field(
        None,
        ge=10,
        description="None: 2 s, at most half the lease assignment interval; without any lease: "
        "every second. KCL: half the interval",
    )
    checkpoint_lag_millis: int | None = Field(
        None,
        ge=0,
        description="Longest time between a commit and the checkpoint in the lease row. A renewal "
        "writes it. None: the renewal interval. 0: after every batch, by a write of its own. Only "
        "a worker of the Java KCL repeats records for it. A function as the sink always has 0",
    )
    consistent_reads: bool = Field(
        True, description="KCL: false; a fast takeover may then read an older checkpoint"
    )
    dynamo_db_request_timeout_millis: int = Field(
        60_000,
        ge=100,
        description="Longest time of a call to DynamoDB. The renewal interval can shorten it",
    )
    max_lease_renewal_threads: int = Field(20, ge=1, description="Threads that renew leases")
    lease_table_scan_total_segments: int | None = Field(
        None, ge=1, le=1_000_000, description="None: by table size, 1 to 32"
    )
    is_graceful_lease_handoff_enabled: bool = Field(
        True,
        description="The old owner of a moved lease finishes its batch and checkpoints first. "
        "False: the new owner takes the lease at once",
    )
    graceful_lease_handoff_timeout_millis: int = Field(
        30_000,
        ge=100,
        description="A new owner takes a lease that the old owner has not handed off for this time",
    )
    release_leases_on_shutdown: bool = Field(
        True,
        description="KCL waits until leases expire. A released lease is assigned in the next "
        "leader cycle",
    )

    @property
    def renewal_interval_millis(self) -> int:
        """A third of the failover time, less epsilon (protocol §6.1)."""
        return max(self.failover_time_millis // 3 - self.epsilon_millis, 1)

    @property
    def checkpoint_lag(self) -> int:
        """`checkpoint_lag_millis`: the renewal interval unless set."""
        lag = self.checkpoint_lag_millis
        return self.renewal_interval_millis if lag is None else lag


class LeaderSettings(StrictSettings):
    """The leader lock (protocol §3.3).

    The row stores the duration, and all other processes use the stored value.
    """

    leader_lease_duration_millis: int = Field(
        8_000,
        ge=200,
        le=MAX_LOCK_DURATION_MILLIS,
        description="Unless set: 0.8 times the failover time, from 2000 to 30000. The sensor: at "
        "least 15000, because its ticks are 5 s apart. KCL: 120000",
    )
    leader_heartbeat_period_millis: int = Field(
        2_500,
        ge=50,
        le=MAX_LOCK_DURATION_MILLIS // 2,
        description="Unless set: a third of the duration. KCL: 30000",
    )

    @model_validator(mode="after")
    def _duration_covers_two_heartbeats(self) -> Self:
        needed = 2 * self.leader_heartbeat_period_millis
        if self.leader_lease_duration_millis >= needed:
            return self
        if "leader_lease_duration_millis" in self.model_fields_set:
            raise ValueError(
                f"leader.leader_lease_duration_millis={self.leader_lease_duration_millis} is below "
                f"two heartbeats. Write {needed} or more, or a "
                "shorter leader.leader_heartbeat_period_millis"
            )
        # The default follows the heartbeat, and stays a default: see `leader.lock_times`.
        object.__setattr__(self, "leader_lease_duration_millis", needed)
        return self


class BatchSettings(StrictSettings):
    """Size of micro-batches, and failed records."""

    max_batch_records: int = Field(200_000, ge=1, description="Most records of a batch")
    max_batch_bytes: int = Field(
        64 * 1024 * 1024, ge=1024, description="Largest size of the records of a batch"
    )
    min_batch_interval_millis: int = Field(
        100,
        ge=0,
        description="A small batch waits this long for more records, and five times as long while "
        "its shards are behind. It does not wait if no read is under way or due in that time. With "
        "enhanced fan-out, the least time between two small batches",
    )
    failed_records: Literal["dead_letter", "fail", "skip"] = Field(
        "dead_letter",
        description="What to do with a record on which the transform fails, or which it returns "
        "with _error. dead_letter: write it to the dead-letter table. skip: omit it, with an "
        "event and a count. fail: pause its shard",
    )
    max_dead_letter_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="A shard pauses when more than this share of its records in a batch fail: "
        "then the transform is broken, not the records. A batch with fewer than 20 records of the "
        "shard counts together with the ones before it, as 20 records at least. 0: the first "
        "failing record pauses the shard. 1: it never pauses for this. Also with skip",
    )
    max_dead_letters_per_batch: int = Field(
        10_000,
        ge=0,
        description="A shard pauses when more than this many of its records in a batch fail. Each "
        "costs a few small Spark jobs, or calls of an Arrow transform, unless the transform "
        "returns it with _error. Not with skip",
    )


class ConsumerSettings(StrictSettings):
    """All settings of one application.

    Example:
        >>> from kcl_pipeline import ConsumerSettings
        >>> settings = ConsumerSettings(application_name="orders", streams=("orders",))
        >>> settings.lease.failover_time_millis
        10000
    """

    application_name: str = Field(
        min_length=3,
        max_length=230,
        pattern=r"^[A-Za-z0-9_.-]+$",
        description="Name of the KCL application",
        json_schema_extra={"write": "3 to 230 of the characters A-Z a-z 0-9 _ . -"},
    )
    selects_streams: bool = Field(
        False,
        description="The leader asks for the streams at run time. Written as a function or a "
        "`StreamSelector` in `streams=`",
    )
    streams: tuple[str, ...] = Field(
        max_length=10_000,
        strict=False,
        description="Stream names or ARNs",
        json_schema_extra={"write": "a list of stream names or ARNs, such as ['orders']"},
    )
    stream_settings: dict[str, StreamSettings] = Field(
        default_factory=dict,
        description="Initial position and consumer by stream. Written as `StreamConfig` in "
        "`streams=`",
    )
    table_layout: Literal["auto", "three", "single"] = Field(
        "auto",
        description="auto: the layout that the application has; for a new one three tables, which "
        "every KCL from 3.0 can share. single: one table, as in a new application of the Java KCL "
        "from 3.5. three and single refuse an application in the other layout",
    )
    coordination: Literal["leader", "leaderless"] = Field(
        "leader",
        description="leader: an elected leader assigns the leases. leaderless: workers take them "
        "from each other as in KCL 2.x, and a leader only creates and deletes leases. Must be "
        "the same in all processes of the application",
    )
    client_version_config: Literal[
        "CLIENT_VERSION_CONFIG_COMPATIBLE_WITH_2X", "CLIENT_VERSION_CONFIG_3X"
    ] = Field(
        "CLIENT_VERSION_CONFIG_3X",
        description="CLIENT_VERSION_CONFIG_COMPATIBLE_WITH_2X: workers of KCL 2.x run in this "
        "application, or it may be rolled back to them. CLIENT_VERSION_CONFIG_3X: none does",
    )
    lease_table: TableSettings = TableSettings()
    worker_metrics_table: TableSettings = TableSettings()
    coordinator_state_table: TableSettings = TableSettings()
    lease: LeaseSettings = LeaseSettings()
    assignment: AssignmentSettings = AssignmentSettings()
    leader: LeaderSettings = LeaderSettings()
    shard_sync: ShardSyncSettings = ShardSyncSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    batch: BatchSettings = BatchSettings()
    worker: WorkerSettings = WorkerSettings()
    metrics: MetricsSettings = MetricsSettings()

    @field_validator("streams")
    @classmethod
    def _streams_are_distinct(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not value and not info.data.get("selects_streams"):
            raise PydanticCustomError("too_short", "no stream")
        if len(set(value)) != len(value):
            raise ValueError(f"streams={list(value)} names a stream twice. Write each stream once")
        for number, name in enumerate(value):
            if not is_stream(name):
                raise ValueError(
                    f"streams[{number}]={name!r} is not a stream. Write {STREAM_FORMS}"
                )
        return value

    @model_validator(mode="after")
    def _consumers_belong_to_streams(self) -> Self:
        for name, of_stream in self.stream_settings.items():
            if name not in self.streams:
                raise ValueError(
                    f"stream_settings[{name!r}] is not in streams={list(self.streams)}"
                )
            arn = of_stream.consumer_arn
            if arn is None:
                continue
            if not names_stream(name, stream_of_consumer(arn) or ""):
                raise ValueError(
                    f"consumer_arn={arn!r} is a consumer of another stream than {name!r}. Write "
                    "the ARN of a consumer of this stream"
                )
            if self.retrieval.retrieval_mode == "polling":
                raise ValueError(
                    f"consumer_arn={arn!r} is not used with retrieval.retrieval_mode='polling'. "
                    "Write retrieval_mode='fan_out' or 'auto', or omit the consumer"
                )
        return self

    def settings_of(self, stream: StreamId) -> StreamSettings | None:
        """Return the settings of one stream. The ARN is preferred over the name."""
        for name in (stream.arn, stream.name):
            if name is not None and name in self.streams:
                return self.stream_settings.get(name)
        return None

    def shard_sync_of(self, stream: StreamId) -> ShardSyncSettings:
        """Return the settings of shard sync with the initial position of this stream."""
        return self.shard_sync.of_stream(self.settings_of(stream))

    @property
    def consumers_by_stream(self) -> dict[str, str]:
        """ARNs of registered fan-out consumers by the ARN of their stream."""
        of_streams = (one.consumer_arn for one in self.stream_settings.values())
        arns = (*self.retrieval.consumer_arns.values(), *of_streams)
        return {stream_of_consumer(arn) or arn: arn for arn in arns if arn}

    @property
    def record_memory_bytes(self) -> int:
        """`worker.record_memory_max_bytes`: 512 MiB, or more for a large prefetch, unless set."""
        least = max(_RECORD_MEMORY_BYTES, 4 * self.retrieval.prefetch_max_bytes)
        return self.worker.record_memory_max_bytes or least

    @property
    def lease_table_name(self) -> str:
        """Name of the lease table: the application name unless set."""
        return self.lease_table.table_name or self.application_name

    @property
    def worker_metrics_table_name(self) -> str:
        """Name of the worker-metrics table: `<application>-WorkerMetricStats` unless set."""
        return self.worker_metrics_table.table_name or f"{self.application_name}-WorkerMetricStats"

    @property
    def coordinator_state_table_name(self) -> str:
        """Name of the coordinator-state table: `<application>-CoordinatorState` unless set."""
        return (
            self.coordinator_state_table.table_name or f"{self.application_name}-CoordinatorState"
        )

    @property
    def is_multi_stream(self) -> bool:
        """Whether there is more than one stream, or may be.

        Lease keys then contain account, stream and creation epoch.
        """
        return self.selects_streams or len(self.streams) > 1

    @property
    def lease_assignment_interval_millis(self) -> int:
        """Time between two leader cycles: twice the failover time unless set (protocol §5.1)."""
        return (
            self.assignment.lease_assignment_interval_millis or 2 * self.lease.failover_time_millis
        )

    @property
    def kcl_discovery_interval_millis(self) -> int:
        """Time between two discoveries of a Java worker (protocol §6.1).

        Half the assignment interval less epsilon.
        """
        return max(self.lease_assignment_interval_millis // 2 - self.lease.epsilon_millis, 10)

    @property
    def lease_discovery_interval_millis(self) -> int:
        """Time between two discoveries of assigned leases: at most 2 s unless set."""
        return self.lease.lease_discovery_interval_millis or min(
            self.kcl_discovery_interval_millis, _DISCOVERY_MILLIS
        )
