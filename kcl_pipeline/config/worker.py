"""The settings of one worker, a part of `config`."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from kcl_pipeline.config.model import StrictSettings


class WorkerSettings(StrictSettings):
    """One worker (protocol §2.3, §6.6)."""

    worker_metrics_reporter_freq_in_millis: int = Field(10_000, ge=50, description="KCL: 30000")
    in_memory_worker_metrics_capture_frequency_millis: int = Field(
        1_000, ge=10, description="Time between two samples of the CPU"
    )
    no_of_persisted_metrics_per_worker_metrics: int = Field(
        10, ge=1, description="Number of averages in the row of the worker"
    )
    disable_worker_metrics: bool = Field(False, description="Report no CPU")
    parent_shard_poll_interval_millis: int = Field(2_000, ge=10, description="KCL: 10000")
    task_backoff_time_millis: int = Field(
        500,
        ge=0,
        description="Wait before a failed step of a shard is repeated. It doubles with each "
        "failure. A shard that pauses, because its records fail, first waits twice as long",
    )
    call_process_records_even_for_empty_record_list: bool = Field(
        False,
        description="Whether a record processor is also called with no records, after a read that "
        "found none",
    )
    shard_stalled_after_millis: int = Field(
        120_000,
        ge=10,
        description="A held lease without progress for this time is reported as ShardStalled, "
        "and again after each such time. Choose more than the longest batch takes",
    )
    hung_after_millis: int = Field(
        300_000,
        ge=10,
        description="A worker whose processing thread has not begun a new step for this time, "
        "while records wait, is hung: event WorkerHung, repeated after each such time, state `hung`"
        " in its row, and a failing check. A call of the transform with the write of its rows is "
        "one step. Choose more than the longest one takes",
    )
    stop_timeout_millis: int = Field(
        20_000,
        ge=100,
        description="How long a worker that was told to stop (SIGTERM, Ctrl-C, termination in "
        "Dagster) waits for a call of the transform, or of a function as the sink. Then it abandons"
        " the batch, which is read again, releases its leases and ends. A call to AWS or to the "
        "store is waited for 2.5 s at most. Set the grace period of the platform at least 8 s "
        "above it",
    )
    stop_hung_after_millis: int | None = Field(
        None,
        ge=10,
        description="A worker that has been in one step for this time, while records wait, "
        "releases its leases and ends its run as failed. Not below hung_after_millis. None: a hung "
        "worker keeps its leases until the step ends or a person ends the process",
    )
    useless_after_millis: int = Field(
        300_000,
        ge=10,
        description="A worker that could neither read, renew nor commit for this time ends its run "
        "as failed; the command `worker` exits with code 5, so that its supervisor acts. A worker "
        "without leases counts as useful while it can look for leases and write its row",
    )
    record_memory_max_bytes: int | None = Field(
        None,
        ge=64 * 1024 * 1024,
        description="Memory for records and results of a worker: records that wait, reads under "
        "way, the batch in processing, its copy for Spark, its result, and memory files that are "
        "kept for the next batch. At the limit, reading waits, and results are written to the "
        "disk. At most a quarter is used for records that wait, and for the records of a batch. "
        "None: 536870912, or four times prefetch_max_bytes if that is more",
    )
    worker_group_separator: str = Field(
        "-", min_length=1, description="The group is the worker id up to the first of these"
    )

    @model_validator(mode="after")
    def _stop_follows_the_report(self) -> Self:
        stop = self.stop_hung_after_millis
        if stop is not None and stop < self.hung_after_millis:
            raise ValueError(
                f"stop_hung_after_millis={stop} is below hung_after_millis="
                f"{self.hung_after_millis}. Write a time that is not below it"
            )
        return self
