"""Start a worker: open the application, record its identity, and create deleted tables again.

`open_application` finds streams and tables before any slow step of the start. `record_application`
refuses what does not fit the record. `DeletedTables` creates tables in DynamoDB again that were
deleted while a worker runs. The shards continue after the positions in the table of the sink. With
a function as the sink they begin at the initial position, as with KCL.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import STREAM_ERRORS, ApplicationPausedError, AwsError
from kcl_pipeline.events import AwsTrouble, EventSink, StreamUnavailable
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leader.streams import SelectStreams, selected_streams
from kcl_pipeline.leases.application import (
    ApplicationIdentity,
    ApplicationRecord,
    Pause,
    RecordedStream,
    with_recorded,
)
from kcl_pipeline.leases.coordinator import CoordinatorStateTable
from kcl_pipeline.leases.identity_check import check_application, check_leases, ensure_application
from kcl_pipeline.leases.workers import WorkerMetricsTable
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.shards import StreamId
from kcl_pipeline.threads import StoppedWhileRetryingError, retry_transient
from kcl_pipeline.unexpected import described
from kcl_pipeline.worker.dependencies import OpenedApplication, WorkerDependencies


def open_application(
    settings: ConsumerSettings,
    kinesis: KinesisClient,
    lease_table: LeaseTable,
    worker_table: WorkerMetricsTable,
    coordinator_table: CoordinatorStateTable,
    *,
    sink_address: str | None,
    clock: Clock,
    rng: random.Random,
    events: EventSink,
    stop: StopSignal,
    select: SelectStreams | None = None,
) -> OpenedApplication:
    """Look up the streams, create missing tables, and refuse tables of another application.

    If one of several streams cannot be used, the start goes on without it. If the settings do not
    name the streams and `select` fails, the start goes on with the recorded ones.

    Raises:
        NotFoundError: No stream exists.
        AccessDeniedError: A permission is missing, for the tables or for every stream.
        IncompatibleTableError: The tables are not of this layout or application.
        AwsError: A table stayed unusable for the time of `threads.START_UP`.
        StoppedWhileRetryingError: `stop` was set while a failed step waited.
    """
    is_multi_stream = settings.is_multi_stream
    names = settings.streams if select is None else _selected(select, events)
    found, unavailable = _usable_streams(names, kinesis, is_multi_stream=is_multi_stream)
    for table in (lease_table, worker_table, coordinator_table):
        retry_transient("look at the tables", table.ensure_exists, clock, rng, events, stop)
    identity = ApplicationIdentity.of(
        found,
        is_multi_stream=is_multi_stream,
        sink=sink_address,
        shard_sync_of=settings.shard_sync_of,
        whole_aggregates=settings.retrieval.skip_kpl_deaggregation,
    )

    def compare() -> tuple[ApplicationIdentity, Pause | None]:
        record = coordinator_table.read_application()
        wanted = with_recorded(identity, record, unavailable, keep_all=settings.selects_streams)
        if record is None:  # refused before any row is written
            check_leases(
                settings.application_name,
                coordinator_table,
                lease_table,
                wanted,
                lambda: kinesis.list_shards(found[0]),
            )
        recorded = check_application(settings.application_name, coordinator_table, wanted)
        return wanted, recorded.control.pause

    identity, pause = retry_transient(
        "look at the identity of the application", compare, clock, rng, events, stop
    )
    return OpenedApplication(tuple(found), identity, unavailable, pause)


def refuse_pause(name: str, pause: Pause | None) -> None:
    """Refuse a start while the application is paused.

    Raises:
        ApplicationPausedError: It is paused.
    """
    if pause is not None:
        raise ApplicationPausedError(
            f"the application {name!r} is {pause.sentence}; resume it with `kcl-pipeline do resume`"
        )


def _selected(select: SelectStreams, events: EventSink) -> tuple[str, ...]:
    try:
        return selected_streams(select)
    except Exception as error:  # noqa: BLE001 (the function may be the user's)
        what = "selection of the streams; the recorded ones are read"
        events(AwsTrouble(what, described(error, what)))
        return ()


def _usable_streams(
    names: Iterable[str], kinesis: KinesisClient, *, is_multi_stream: bool
) -> tuple[list[StreamId], dict[str, AwsError]]:
    """Return the streams that can be used, and the errors of the others.

    Raises the error of the first stream if none of them can be used.
    """
    found: list[StreamId] = []
    unavailable: dict[str, AwsError] = {}
    for name in names:
        try:
            found.append(kinesis.resolve_stream(name, multi_stream=is_multi_stream))
        except STREAM_ERRORS as error:
            unavailable[name] = error
    if unavailable and not found:
        raise next(iter(unavailable.values()))
    return found, unavailable


_RECORDING: Final = "recording streams that the record lacks"


def record_application(
    application: OpenedApplication, dependencies: WorkerDependencies, stop: StopSignal
) -> ApplicationIdentity:
    """Record the identity of a worker that starts, and return the record.

    Raises:
        OtherApplicationError: The start does not fit the record.
        ApplicationPausedError: The application is paused.
        AwsError: The record stayed unusable for the time of `threads.START_UP`.
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
        dependencies.events(StreamUnavailable(dependencies.worker_id, stream.arn, str(error)))
        return None
    return RecordedStream.of(found, dependencies.settings.shard_sync_of(found))


class DeletedTables:
    """Notes that a table is missing, and creates it. Any thread may call `note`, one `restore`.

    Args:
        dependencies: The dependencies of the worker.
        application: Returns the application that the worker has opened.
        stop: Ends the worker.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        application: Callable[[], OpenedApplication],
        stop: StopSignal,
    ) -> None:
        self._dependencies = dependencies
        self._application = application
        self._stop = stop
        self._is_missed = False

    def note(self) -> None:
        """Note that a call did not find its table."""
        self._is_missed = True

    def restore(self, start_version: Callable[[], None]) -> None:
        """Create the missing tables, and record the application again.

        A failure is reported as `AwsTrouble`, and the next call tries again.

        Args:
            start_version: Writes the client version, which is recorded before the application.

        Raises:
            OtherApplicationError: Another application has the tables now.
            ApplicationPausedError: The application is paused.
        """
        if not self._is_missed or self._stop.is_set():
            return
        dependencies, self._is_missed = self._dependencies, False
        try:
            for table in (
                dependencies.lease_table,
                dependencies.worker_table,
                dependencies.coordinator_table,
            ):
                if table.ensure_exists():
                    self._tell(f"the table {table.name} did not exist any more; it exists again")
            start_version()
            record_application(self._application(), dependencies, self._stop)
        except AwsError as error:
            self._is_missed = True
            self._tell(str(error))
        except StoppedWhileRetryingError as error:
            self._tell(str(error))

    def _tell(self, text: str) -> None:
        self._dependencies.events(AwsTrouble("creation of deleted tables", text))
