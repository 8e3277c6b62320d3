"""Record the identity of an application when a worker starts, and refuse a paused one."""

from __future__ import annotations

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.leases.application.identity import ApplicationIdentity
from kcl_pipeline.leases.identity_check import ensure_application
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.retry import retry_transient
from kcl_pipeline.worker.starting import OpenedApplication, refuse_pause


def record_application(
    application: OpenedApplication, parts: WorkerDependencies, stop: StopSignal
) -> ApplicationIdentity:
    """Record the identity of a worker that starts, and return the record.

    Raises:
        OtherApplicationError: The start does not fit the record.
        ApplicationPausedError: The application is paused.
        AwsError: The record stayed unusable for the time of `retry.START_UP`.
        StoppedWhileRetryingError: `stop` was set while a failed step waited.
    """
    recorded = retry_transient(
        "look at the identity of the application",
        lambda: ensure_application(
            parts.settings.application_name,
            parts.coordinator_table,
            parts.lease_table,
            application.identity,
            lambda: parts.kinesis.list_shards(application.streams[0]),
        ),
        parts.clock,
        parts.rng,
        parts.events,
        stop,
    )
    refuse_pause(parts.settings.application_name, recorded.control.pause)
    return recorded.identity
