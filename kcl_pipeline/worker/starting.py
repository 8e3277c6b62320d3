"""Open an application: streams, tables and identity, before any slow step of the start."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import STREAM_ERRORS, ApplicationPausedError, AwsError
from kcl_pipeline.events import AwsTrouble, EventSink
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leader.streams.selection import SelectStreams, selected_streams
from kcl_pipeline.leases.application.control import Pause
from kcl_pipeline.leases.application.identity import ApplicationIdentity, with_recorded
from kcl_pipeline.leases.application.recorded_stream import unnamed_labels
from kcl_pipeline.leases.identity_check import check_application, check_leases
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaseTable, WorkerMetricsTable
from kcl_pipeline.shards import StreamId
from kcl_pipeline.worker.retry import retry_transient


@dataclass(frozen=True, slots=True)
class OpenedApplication:
    """An application whose tables are usable and belong to it.

    Attributes:
        streams: The streams of the settings that can be used now.
        identity: The identity that a worker records at its start.
        unavailable: Errors of the other streams of the settings.
        pause: The pause of the application, when it was opened. None: it was not paused.
    """

    streams: tuple[StreamId, ...]
    identity: ApplicationIdentity
    unavailable: Mapping[str, AwsError] = field(default_factory=dict)
    pause: Pause | None = None

    def unnamed(self, recorded: ApplicationIdentity) -> tuple[str, ...]:
        """Return the recorded streams that the settings do not name."""
        arns = (stream.arn or stream.name for stream in self.streams)
        return unnamed_labels(recorded.streams, (*arns, *self.unavailable))


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
        AwsError: A table stayed unusable for the time of `retry.START_UP`.
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
        text = f"{type(error).__name__}: {error}"
        events(AwsTrouble("selection of the streams; the recorded ones are read", text))
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
