"""The settings for reading shards, a part of `config`."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from kcl_pipeline.config.model import (
    CONSUMER_FORM,
    StrictSettings,
    names_stream,
    stream_of_consumer,
)


class RetrievalSettings(StrictSettings):
    """Reading shards (protocol §10.2)."""

    max_records: int = Field(
        10_000, ge=1, le=10_000, description="Most records of a GetRecords response"
    )
    idle_time_between_reads_in_millis: int = Field(
        500,
        ge=200,
        description="Least time between two reads of a shard at its end. Up to a tenth more, so "
        "that all shards of a worker are read at the same times. KCL: 1500",
    )
    kinesis_request_timeout_millis: int = Field(
        30_000, ge=100, description="Longest time of a call to Kinesis"
    )
    body_format: Literal["auto", "json", "cbor"] = Field(
        "auto",
        description="Format of GetRecords responses. auto: CBOR for a stream whose last response "
        "had half a megabyte or more, or records above 8 KiB on average, else JSON. JSON for "
        "ten minutes after a CBOR response that cannot be read, or three refused requests. CPU "
        "time of decoding JSON over that of CBOR in full responses (benchmarks.decode --sizes): "
        "1.7 at 100 B, 1.9 at 1 KiB, 2.0 at 10 KiB",
    )
    prefetch_max_bytes: int = Field(
        128 * 1024 * 1024,
        ge=1024 * 1024,
        description="Records that are ready, per worker, over all its shards. The default is two "
        "full batches, so that reading continues while one is processed",
    )
    fetch_threads: int = Field(4, ge=1, le=256, description="Threads that read shards")
    skip_kpl_deaggregation: bool = Field(
        False,
        description="Leave KPL aggregates as they are. The value of the first start is recorded: "
        "another one is refused, because positions may be inside of aggregates",
    )
    fetch_on: Literal["auto", "driver", "executors"] = Field(
        "auto",
        description="Who reads the shards. auto: the driver where Spark is local[...] or not "
        "used, else the executors, which need this package, the "
        "credentials to read the stream, and a table that they can write to",
    )
    executors_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of the driver for its tasks, when executors fetch for a Spark "
        "transform. 0: any free port",
    )
    retrieval_mode: Literal["polling", "fan_out", "auto"] = Field(
        "polling",
        description="KCL: fan_out, which AWS bills per consumer, shard and hour. auto: "
        "fan_out while this worker holds at most fan_out_max_shards "
        "leases and its consumer can be registered, else polling",
    )
    consumer_name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.-]{1,128}$",
        json_schema_extra={"write": "1 to 128 of the characters A-Z a-z 0-9 _ . -"},
        description="Name of the fan-out consumer. None: the application name",
    )
    consumer_arns: dict[str, str] = Field(
        default_factory=dict,
        description="Stream name or ARN to the ARN of a registered consumer; no consumer is "
        "registered. See also `StreamConfig`",
        json_schema_extra={"write": "a dictionary of stream names to ARNs of consumers"},
    )
    fan_out_max_shards: int = Field(
        16,
        ge=1,
        description="Only with auto. A subscription uses a connection, a thread and up to 8 MiB",
    )
    fan_out_http: Literal["1.1", "2"] = Field(
        "1.1",
        description="HTTP version of subscriptions. 1.1: a connection and a thread for each. "
        "2: a connection for every 32, without a thread for each. 2 needs the extra http2 and an "
        "endpoint with HTTP/2, and does not use a proxy",
    )
    fan_out_stall_millis: int = Field(
        20_000,
        ge=1_000,
        description="A subscription without an event for this time is renewed. AWS sends one at "
        "least every 5 s",
    )

    arrived_from: datetime | None = Field(
        None,
        strict=False,
        description="Only records that arrived at this time or later are read. Only with polling. "
        "`kcl-pipeline do replay` sets it",
        json_schema_extra={"write": "a time with a time zone, such as 2026-01-31T12:00:00+00:00"},
    )
    arrived_before: datetime | None = Field(
        None,
        strict=False,
        description="Only records that arrived before this time are read. Only with polling. "
        "`kcl-pipeline do replay` sets it",
        json_schema_extra={"write": "a time with a time zone, such as 2026-01-31T12:00:00+00:00"},
    )

    @field_validator("arrived_from", "arrived_before")
    @classmethod
    def _has_a_zone(cls, value: datetime | None) -> datetime | None:
        if value is not None and value.tzinfo is None:
            raise ValueError(
                f"retrieval: the time {value.isoformat()} has no time zone. Write "
                f"{value.isoformat()}+00:00 for UTC"
            )
        return value

    @model_validator(mode="after")
    def _range_is_polled(self) -> Self:
        begin, end = self.arrived_from, self.arrived_before
        if begin is not None and end is not None and begin >= end:
            raise ValueError(f"retrieval.arrived_from={begin} is not before arrived_before={end}")
        if self.is_bounded and self.retrieval_mode != "polling":
            raise ValueError(
                f"retrieval.retrieval_mode={self.retrieval_mode!r} reads no time range. Write "
                "'polling', or omit arrived_from and arrived_before"
            )
        return self

    @property
    def is_bounded(self) -> bool:
        """Whether only records of a time range are read."""
        return self.arrived_from is not None or self.arrived_before is not None

    @field_validator("consumer_arns")
    @classmethod
    def _are_consumers(cls, value: dict[str, str]) -> dict[str, str]:
        for stream, arn in value.items():
            of_stream = stream_of_consumer(arn)
            if of_stream is None:
                raise ValueError(
                    f"retrieval.consumer_arns[{stream!r}]={arn!r} is not the ARN of a consumer. "
                    f"Write {CONSUMER_FORM}"
                )
            if not names_stream(stream, of_stream):
                raise ValueError(
                    f"retrieval.consumer_arns[{stream!r}]={arn!r} is a consumer of another stream. "
                    "Write the ARN of a consumer of this stream"
                )
        return value
