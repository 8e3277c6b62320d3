"""The settings of shard sync, and those of single streams, a part of `config`."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from kcl_pipeline.config.model import (
    CONSUMER_FORM,
    STREAM_FORMS,
    StrictSettings,
    is_stream,
    stream_of_consumer,
)

InitialPosition = Literal["LATEST", "TRIM_HORIZON", "AT_TIMESTAMP"]
FormerStreamsStrategy = Literal[
    "NO_STREAMS_LEASES_DELETION",
    "PROVIDED_STREAMS_DEFERRED_DELETION",
    "FORMER_STREAMS_AUTO_DETECTION_DEFERRED_DELETION",
]


class ShardSyncSettings(StrictSettings):
    """Shard sync (protocol §7) and removal of the leases of finished shards (protocol §8)."""

    initial_position_in_stream: InitialPosition = Field("TRIM_HORIZON", description="KCL: LATEST")
    initial_timestamp: datetime | None = Field(
        None,
        strict=False,
        description="Required with AT_TIMESTAMP; with a time zone",
        json_schema_extra={"write": "a time with a time zone, such as 2026-01-31T12:00:00+00:00"},
    )
    leases_recovery_auditor_execution_frequency_millis: int = Field(
        120_000, ge=10, description="Time between two searches for hash keys that no lease covers"
    )
    leases_recovery_auditor_inconsistency_confidence_threshold: int = Field(
        3,
        ge=1,
        description="Number of searches in a row that must find a hole before shard sync repairs "
        "it",
    )
    list_shards_backoff_time_millis: int = Field(
        1_500, ge=0, description="Wait before ListShards is repeated"
    )
    max_list_shards_retry_attempts: int = Field(
        50, ge=1, description="Repetitions of ListShards in one shard sync"
    )
    ignore_unexpected_child_shards: bool = Field(
        False, description="Skip a child shard whose parent is missing, instead of an error"
    )
    cleanup_leases_upon_shard_completion: bool = Field(
        True, description="Delete the lease of a finished shard when its children have begun"
    )
    completed_lease_cleanup_interval_millis: int = Field(
        300_000, ge=0, description="The lease of a finished shard is kept at least this long"
    )
    garbage_lease_cleanup_interval_millis: int = Field(
        1_800_000,
        ge=0,
        description="The lease of a shard that does not exist any more is kept at least this long",
    )
    former_streams_leases_deletion_strategy: FormerStreamsStrategy = Field(
        "NO_STREAMS_LEASES_DELETION",
        description="Only with several streams. What the leader does with a recorded stream that "
        "is not in `streams` any more: read it (NO_...), or delete its leases and positions, for "
        "the streams in `former_streams` or for all. The default reads it",
    )
    former_streams: tuple[str, ...] = Field(
        (),
        strict=False,
        description="Names or ARNs, with PROVIDED_STREAMS_DEFERRED_DELETION",
        json_schema_extra={"write": "a list of stream names or ARNs, such as ['orders']"},
    )
    wait_period_to_delete_former_streams_millis: int = Field(
        3_600_000,
        ge=0,
        description="A former stream is read for this time, unless it does not exist any more; a "
        "new leader begins again. Choose more than a deploy takes. KCL: required",
    )
    orphaned_stream_initial_position_in_stream: Literal["LATEST", "TRIM_HORIZON"] = Field(
        "TRIM_HORIZON",
        description="For missing leases of a stream that has leases, but is neither in `streams` "
        "nor recorded. KCL: LATEST",
    )

    @field_validator("initial_timestamp")
    @classmethod
    def _has_a_zone(cls, value: datetime | None) -> datetime | None:
        if value is not None and value.tzinfo is None:
            raise ValueError(
                f"shard_sync.initial_timestamp={value.isoformat()} has no time zone. Write "
                f"{value.isoformat()}+00:00 for UTC"
            )
        return value

    @model_validator(mode="after")
    def _timestamp_where_needed(self) -> Self:
        if (self.initial_position_in_stream == "AT_TIMESTAMP") != (
            self.initial_timestamp is not None
        ):
            position = self.initial_position_in_stream
            raise ValueError(
                f"shard_sync.initial_timestamp={self.initial_timestamp} does not fit "
                f"initial_position_in_stream={position!r}. "
                + (
                    "Write a time with a time zone, such as 2026-01-31T12:00:00+00:00"
                    if position == "AT_TIMESTAMP"
                    else "Write initial_position_in_stream='AT_TIMESTAMP', or omit the time"
                )
            )
        return self

    @model_validator(mode="after")
    def _former_streams_where_used(self) -> Self:
        strategy = self.former_streams_leases_deletion_strategy
        if (strategy == "PROVIDED_STREAMS_DEFERRED_DELETION") != bool(self.former_streams):
            raise ValueError(
                f"shard_sync.former_streams={list(self.former_streams)} does not fit "
                f"former_streams_leases_deletion_strategy={strategy!r}. Write a list of streams "
                "with PROVIDED_STREAMS_DEFERRED_DELETION, or omit it"
            )
        for number, name in enumerate(self.former_streams):
            if not is_stream(name):
                raise ValueError(
                    f"shard_sync.former_streams[{number}]={name!r} is not a stream. "
                    f"Write {STREAM_FORMS}"
                )
        return self

    @property
    def initial_millis(self) -> int | None:
        """`initial_timestamp` in epoch milliseconds, rounded down, and not negative."""
        time = self.initial_timestamp
        return None if time is None else max(math.floor(time.timestamp() * 1000), 0)

    def beginning_at(self, position: InitialPosition, millis: int | None) -> ShardSyncSettings:
        """Return these settings with another initial position, and its time for AT_TIMESTAMP."""
        time = None if millis is None else datetime.fromtimestamp(millis / 1000, UTC)
        return self.model_copy(
            update={"initial_position_in_stream": position, "initial_timestamp": time}
        )

    def of_orphan(self) -> ShardSyncSettings:
        """Return these settings with the initial position of orphaned streams."""
        return self.beginning_at(self.orphaned_stream_initial_position_in_stream, None)

    def of_stream(self, stream: StreamSettings | None) -> ShardSyncSettings:
        """Return these settings with the initial position of one stream."""
        if stream is None or stream.initial_position_in_stream is None:
            return self
        return self.model_copy(
            update={
                "initial_position_in_stream": stream.initial_position_in_stream,
                "initial_timestamp": stream.initial_timestamp,
            }
        )


class StreamSettings(StrictSettings):
    """The settings of one stream. `StreamConfig` writes them."""

    initial_position_in_stream: InitialPosition | None = None
    initial_timestamp: datetime | None = Field(None, strict=False)
    consumer_arn: str | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        time = self.initial_timestamp
        if (self.initial_position_in_stream == "AT_TIMESTAMP") != (time is not None):
            raise ValueError(
                f"stream_settings: initial_timestamp={time} does not fit "
                f"initial_position_in_stream={self.initial_position_in_stream!r}. Write a time "
                "and AT_TIMESTAMP, or omit both"
            )
        if time is not None and time.tzinfo is None:
            raise ValueError(
                f"stream_settings: initial_timestamp={time.isoformat()} has no time zone"
            )
        if self.consumer_arn is not None and stream_of_consumer(self.consumer_arn) is None:
            raise ValueError(
                f"stream_settings: consumer_arn={self.consumer_arn!r} is not the ARN of a "
                f"consumer. Write {CONSUMER_FORM}"
            )
        return self
