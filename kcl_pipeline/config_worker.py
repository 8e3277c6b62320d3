"""The settings of one worker, a part of `config`."""

from __future__ import annotations

from pydantic import Field

from kcl_pipeline.settings_model import StrictSettings


class WorkerSettings(StrictSettings):
    """One worker (protocol §2.3, §6.6)."""

    worker_metrics_reporter_freq_in_millis: int = Field(10_000, ge=50, description="KCL: 30000")
    in_memory_worker_metrics_capture_frequency_millis: int = Field(1_000, ge=10)
    no_of_persisted_metrics_per_worker_metrics: int = Field(10, ge=1)
    disable_worker_metrics: bool = False
    parent_shard_poll_interval_millis: int = Field(2_000, ge=10, description="KCL: 10000")
    task_backoff_time_millis: int = Field(500, ge=0)
    shard_stalled_after_millis: int = Field(
        120_000,
        ge=10,
        description="A held lease without progress for this time is reported as ShardStalled, "
        "and again after each such time. Choose more than the longest batch takes",
    )
    hung_after_millis: int = Field(
        900_000,
        ge=10,
        description="A worker whose processing thread has not begun a new step for this time, "
        "while records wait, is hung: event WorkerHung, repeated after each such time, state `hung`"
        " in its row, and a failing check. A call of the transform with the write of its rows is "
        "one step. Choose more than the longest one takes",
    )
    worker_group_separator: str = Field(
        "-", min_length=1, description="The group is the worker id up to the first of these"
    )
