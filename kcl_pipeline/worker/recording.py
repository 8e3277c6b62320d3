"""Record the identity of an application when a worker starts, and refuse what does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import STREAM_ERRORS, ApplicationPausedError
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.leases.application.identity import ApplicationIdentity, ApplicationRecord
from kcl_pipeline.leases.application.recorded_stream import RecordedStream
from kcl_pipeline.leases.identity_check import ensure_application
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.retry import StoppedWhileRetryingError, retry_transient
from kcl_pipeline.worker.starting import OpenedApplication, refuse_pause

_RECORDING: Final = "recording streams that the record lacks"


def record_application(
    application: OpenedApplication, dependencies: WorkerDependencies, stop: StopSignal
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
            dependencies.settings.application_name,
            dependencies.coordinator_table,
            dependencies.lease_table,
            application.identity,
            lambda: dependencies.kinesis.list_shards(application.streams[0]),
        ),
        dependencies.clock,
        dependencies.rng,
        dependencies.events,
        stop,
    )
    refuse_pause(dependencies.settings.application_name, recorded.control.pause)
    return recorded.identity


def record_missing_streams(
    application: OpenedApplication,
    recorded: ApplicationRecord,
    dependencies: WorkerDependencies,
    stop: StopSignal,
) -> ApplicationIdentity:
    """Record the streams of this worker again that the record lacks, and return the record.

    After all tables were deleted, a process that does not name a new stream may have recorded the
    application. A stream that does not exist any more stays out, because a leader removed it.

    Raises:
        OtherApplicationError: The application does not fit the record.
        AwsError: The record cannot be used now, or the service does not describe a stream now.
    """
    identity, wanted = recorded.identity, application.identity
    if identity.mode == "single_stream" or recorded.control.pause is not None:
        return identity
    known = {one.account_and_name for one in identity.streams}
    lacking = [one for one in wanted.streams if one.account_and_name not in known]
    existing = [found for one in lacking if (found := _existing(one, dependencies)) is not None]
    if not existing:
        return identity
    kept = [one for one in wanted.streams if one.account_and_name in known]
    following = replace(wanted, streams=(*kept, *existing))
    try:
        return record_application(replace(application, identity=following), dependencies, stop)
    except (ApplicationPausedError, StoppedWhileRetryingError) as error:
        dependencies.events(AwsTrouble(_RECORDING, str(error)))
        return identity


def _existing(stream: RecordedStream, dependencies: WorkerDependencies) -> RecordedStream | None:
    """Return the stream as it is now: it may have been created again. None: it cannot be used.

    Raises:
        AwsError: The service does not describe it now.
    """
    try:
        found = dependencies.kinesis.resolve_stream(stream.arn, multi_stream=True)
    except STREAM_ERRORS as error:
        dependencies.events(AwsTrouble(_RECORDING, f"{stream.arn}: {error}"))
        return None
    return RecordedStream.of(found, dependencies.settings.shard_sync_of(found))
