"""Record the identity of an application when a worker starts, and refuse what does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kcl_pipeline.batch import ShortNames, TransactionalSink
from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import (
    STREAM_ERRORS,
    ApplicationPausedError,
    OtherApplicationError,
    SinkError,
)
from kcl_pipeline.events import AwsTrouble, EventSink
from kcl_pipeline.leases.application.identity import ApplicationIdentity, ApplicationRecord
from kcl_pipeline.leases.application.recorded_stream import RecordedStream
from kcl_pipeline.leases.identity_check import ensure_application, protocol_of
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.retry import StoppedWhileRetryingError, retry_transient
from kcl_pipeline.worker.starting import OpenedApplication, refuse_pause

_RECORDING: Final = "recording streams that the record lacks"


def record_application(
    application: OpenedApplication, parts: WorkerDependencies, stop: StopSignal
) -> ApplicationIdentity:
    """Record the identity of a worker that starts, and return the record.

    The sink then names new positions as recorded.

    Raises:
        OtherApplicationError: The start does not fit the record.
        ApplicationPausedError: The application is paused.
        AwsError: The record stayed unusable for the time of `retry.START_UP`.
        StoppedWhileRetryingError: `stop` was set while a failed step waited.
    """
    sink = parts.sink
    recorded = retry_transient(
        "look at the identity of the application",
        lambda: ensure_application(
            parts.settings.application_name,
            parts.coordinator_table,
            parts.lease_table,
            application.identity,
            lambda: parts.kinesis.list_shards(application.streams[0]),
            lambda: _prefers_short_names(sink, parts.events),
        ),
        parts.clock,
        parts.rng,
        parts.events,
        stop,
    )
    if isinstance(sink, ShortNames):
        sink.name_positions(short=recorded.identity.short_names)
    refuse_pause(parts.settings.application_name, recorded.control.pause)
    return recorded.identity


def record_missing_streams(
    application: OpenedApplication,
    recorded: ApplicationRecord,
    parts: WorkerDependencies,
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
    existing = [found for one in lacking if (found := _existing(one, parts)) is not None]
    if not existing:
        return identity
    kept = [one for one in wanted.streams if one.account_and_name in known]
    following = replace(wanted, streams=(*kept, *existing))
    try:
        return record_application(replace(application, identity=following), parts, stop)
    except (ApplicationPausedError, StoppedWhileRetryingError) as error:
        parts.events(AwsTrouble(_RECORDING, str(error)))
        return identity


def _existing(stream: RecordedStream, parts: WorkerDependencies) -> RecordedStream | None:
    """Return the stream as it is now: it may have been created again. None: it cannot be used.

    Raises:
        AwsError: The service does not describe it now.
    """
    try:
        found = parts.kinesis.resolve_stream(stream.arn, multi_stream=True)
    except STREAM_ERRORS as error:
        parts.events(AwsTrouble(_RECORDING, f"{stream.arn}: {error}"))
        return None
    return RecordedStream.of(found, parts.settings.shard_sync_of(found))


def check_protocol(name: str, recorded: ApplicationIdentity, used: str) -> None:
    """Refuse to take a lease if the record names another commit protocol than this worker uses.

    A worker whose settings name no protocol takes the recorded one at its start, and would not
    notice a later change. Each shard that it takes would then stand still.

    Args:
        name: Name of the application.
        recorded: The record.
        used: The commit protocol of this worker.

    Raises:
        OtherApplicationError: The record names another one.
    """
    now = protocol_of(recorded)
    if now is not None and now != used:
        raise OtherApplicationError(
            f"the commit protocol of the application {name!r} was changed from {used} to {now} "
            "after this worker had started; start the worker again, which then uses the other one"
        )


def _prefers_short_names(sink: TransactionalSink, events: EventSink) -> bool:
    """Return whether new positions get short names. Long ones are always safe."""
    try:
        return isinstance(sink, ShortNames) and sink.prefers_short_names()
    except SinkError as error:
        events(AwsTrouble("choice of the names of positions; they are long", str(error)))
        return False
