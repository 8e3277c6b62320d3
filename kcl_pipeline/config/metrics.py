"""The settings of metrics for operators, a part of `config`."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from kcl_pipeline.config.model import StrictSettings

ALL_DIMENSIONS: Final = "ALL"
_MAX_PORT: Final = 65_535

Backend = Literal["cloudwatch", "prometheus", "otel"]


class MetricsSettings(StrictSettings):
    """Metrics for operators, and where they are exported (protocol §12)."""

    metrics_backends: tuple[Backend, ...] = Field(
        (),
        strict=False,
        description="Where metrics are exported: cloudwatch, prometheus (extra `prometheus`), otel "
        "(extra `otel`). KCL: CLOUDWATCH",
        json_schema_extra={"write": "a list, such as ['prometheus']"},
    )
    metrics_level: Literal["NONE", "SUMMARY", "DETAILED"] = Field(
        "DETAILED",
        description="SUMMARY: fewer metrics, and no dimension ShardId, which KCL keeps",
    )
    metrics_enabled_dimensions: tuple[
        Literal["ALL", "Operation", "ShardId", "StreamId", "WorkerIdentifier"], ...
    ] = Field(
        (ALL_DIMENSIONS,),
        strict=False,
        description="Dimensions of KCL that metrics have. Operation is always one",
        json_schema_extra={"write": "a list, such as ['Operation', 'WorkerIdentifier']"},
    )
    namespace: str | None = Field(
        None,
        min_length=1,
        max_length=255,
        pattern=r"^[A-Za-z0-9._#:/-]+$",
        description="CloudWatch namespace. None: the application name",
        json_schema_extra={"write": "1 to 255 of the characters A-Z a-z 0-9 . _ # : / -"},
    )
    metrics_buffer_time_millis: int = Field(
        10_000, ge=10, description="cloudwatch: values are sent at least this often"
    )
    metrics_max_queue_size: int = Field(
        10_000,
        ge=20,
        le=1_000_000,
        description="cloudwatch: most metrics that wait. A further one replaces the oldest",
    )
    publisher_flush_buffer: int = Field(
        1_000,
        ge=1,
        description="cloudwatch: values are sent when this many metrics wait. A call of "
        "PutMetricData carries 1,000, and has a price",
    )
    prometheus_address: str = Field(
        "127.0.0.1", min_length=1, description="Address of the Prometheus endpoint"
    )
    prometheus_port: int = Field(
        9464, ge=0, le=_MAX_PORT, description="Port of the Prometheus endpoint. 0: any free port"
    )
    prometheus_port_count: int = Field(
        16,
        ge=1,
        le=1_000,
        description="Processes of one host use the first free one of this many ports",
    )
