"""The settings of shard sync, and those of single streams, a part of `config`."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from kcl_pipeline.settings_model import CONSUMER_FORM, StrictSettings, stream_of_consumer

InitialPosition = Literal["LATEST", "TRIM_HORIZON", "AT_TIMESTAMP"]


class ShardSyncSettings(StrictSettings):
    """Shard sync (protocol §7) and removal of the leases of finished shards (protocol §8)."""

    initial_position_in_stream: InitialPosition = Field("TRIM_HORIZON", description="KCL: LATEST")
    initial_timestamp: datetime | None = Field(
        None,
        strict=False,
        description="Required with AT_TIMESTAMP; with a time zone",
        json_schema_extra={"write": "a time with a time zone, such as 2026-01-31T12:00:00+00:00"},
    )
    leases_recovery_auditor_execution_frequency_millis: int = Field(120_000, ge=10)
    leases_recovery_auditor_inconsistency_confidence_threshold: int = Field(3, ge=1)
    list_shards_backoff_time_millis: int = Field(1_500, ge=0)
    max_list_shards_retry_attempts: int = Field(50, ge=1)
    ignore_unexpected_child_shards: bool = False
    cleanup_leases_upon_shard_completion: bool = True
    completed_lease_cleanup_interval_millis: int = Field(
        300_000, ge=0, description="The lease of a finished shard is kept at least this long"
    )
    garbage_lease_cleanup_interval_millis: int = Field(1_800_000, ge=0)

    @field_validator("initial_timestamp")
    @classmethod
    def _has_a_zone(cls, value: datetime | None) -> datetime | None:
        if value is not None and value.tzinfo is None:
            msg = (
                f"shard_sync.initial_timestamp={value.isoformat()} has no time zone. Write "
                f"{value.isoformat()}+00:00 for UTC"
            )
            raise ValueError(msg)
        return value

    @model_validator(mode="after")
    def _timestamp_where_needed(self) -> Self:
        if (self.initial_position_in_stream == "AT_TIMESTAMP") != (
            self.initial_timestamp is not None
        ):
            position = self.initial_position_in_stream
            msg = (
                f"shard_sync.initial_timestamp={self.initial_timestamp} does not fit "
                f"initial_position_in_stream={position!r}. "
                + (
                    "Write a time with a time zone, such as 2026-01-31T12:00:00+00:00"
                    if position == "AT_TIMESTAMP"
                    else "Write initial_position_in_stream='AT_TIMESTAMP', or omit the time"
                )
            )
            raise ValueError(msg)
        return self

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
            msg = (
                f"stream_settings: initial_timestamp={time} does not fit "
                f"initial_position_in_stream={self.initial_position_in_stream!r}. Write a time "
                "and AT_TIMESTAMP, or omit both"
            )
            raise ValueError(msg)
        if time is not None and time.tzinfo is None:
            msg = f"stream_settings: initial_timestamp={time.isoformat()} has no time zone"
            raise ValueError(msg)
        if self.consumer_arn is not None and stream_of_consumer(self.consumer_arn) is None:
            msg = (
                f"stream_settings: consumer_arn={self.consumer_arn!r} is not the ARN of a "
                f"consumer. Write {CONSUMER_FORM}"
            )
            raise ValueError(msg)
        return self
