"""The dead-letter table of a pipeline, as a replay reads and marks it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, cast

from kcl_pipeline.batch import dead_letter_address
from kcl_pipeline.control.replay.dead_letters import DeadLetterKinesis
from kcl_pipeline.delta.dead_letters.records import NO_TABLE, DeadLetterRecords, Selection
from kcl_pipeline.delta.dead_letters.replayed import mark_records, open_dead_letters
from kcl_pipeline.delta.storage.storage import table_root
from kcl_pipeline.errors import SettingsError, SinkError
from kcl_pipeline.events import DeadLettersUnreadable, EventSink
from kcl_pipeline.leases.attributes import MAX_MILLIS
from kcl_pipeline.worker.retry import RetryPolicy, retry_transient

if TYPE_CHECKING:
    from kcl_pipeline.aws import AwsClients
    from kcl_pipeline.clock import Clock, StopSignal
    from kcl_pipeline.control.replay.pipeline import ReplayPipeline
    from kcl_pipeline.leases.application.replay_record import ReplayRecord

_MARKING: Final = RetryPolicy(
    20.0, first_wait_seconds=0.2, longest_wait_seconds=5.0, transient=(SinkError,)
)


@dataclass(frozen=True, slots=True)
class PlannedLetters:
    """The dead letters that a replay reads.

    Attributes:
        table: Address of the dead-letter table.
        records: Number of records.
        streams: By stream, the number of its shards that the records came from.
        unreadable: Number of rows that cannot be replayed.
        example: One of these rows. Empty: there is none.
    """

    table: str
    records: int
    streams: Mapping[str, int] = field(default_factory=dict)
    unreadable: int = 0
    example: str = ""


class StoredLetters:
    """Opens the dead letters of one pipeline, and marks them."""

    def __init__(self, pipeline: object) -> None:
        self._pipeline = cast("ReplayPipeline", pipeline)
        self._opened: tuple[ReplayRecord, DeadLetterRecords] | None = None

    def newest_version(self) -> int:
        """Return the version of the table, or `NO_TABLE`.

        Raises:
            SettingsError: The sink has no dead-letter table.
            SinkError: The table cannot be read.
        """
        found = open_dead_letters(*self._table)
        return NO_TABLE if found is None else found.version()

    def planned(self, record: ReplayRecord) -> PlannedLetters:
        """Return what a replay reads. Raises as `newest_version`."""
        found = self._open(record)
        return PlannedLetters(
            found.root, found.records, dict(found.streams), found.unreadable, found.example
        )

    def reading(self, record: ReplayRecord, clients: AwsClients, events: EventSink) -> AwsClients:
        """Return clients that read the dead letters if the replay is of them, else `clients`."""
        if record.dead_letters is None:
            return clients
        found = self._open(record)
        if found.unreadable:
            events(DeadLettersUnreadable(found.root, found.unreadable, found.example))
        return clients.reading_with(DeadLetterKinesis(found))

    def mark(
        self,
        record: ReplayRecord,
        millis: int,
        clock: Clock,
        events: EventSink,
        stop: StopSignal,
    ) -> int:
        """Mark the rows that the replay has read. Return how many have this time.

        Raises:
            SinkError: The table cannot be written.
            StoppedWhileRetryingError: `stop` was set during the wait before a retry.
        """
        uri, options = self._table
        time = datetime.fromtimestamp(millis / 1000, UTC)
        names = self._open(record).named()
        return retry_transient(
            "mark the dead letters as replayed",
            lambda: mark_records(uri, options, names, time),
            clock,
            random.Random(millis),
            events,
            stop,
            _MARKING,
        )

    @property
    def _table(self) -> tuple[str, Mapping[str, str]]:
        sink: Any = self._pipeline.sink
        address = dead_letter_address(sink)
        if address is None:
            raise SettingsError(
                "the sink of the pipeline has no dead-letter table; set its dead_letter_uri"
            )
        return table_root(address), sink.storage_options

    def _open(self, record: ReplayRecord) -> DeadLetterRecords:
        """Return the records. The last ones are kept."""
        wanted = replace(record, into=None, complete=False, marked_millis=None)
        if self._opened is None or self._opened[0] != wanted:
            uri, options = self._table
            selection = Selection(
                None if record.from_millis == 0 else record.begin,
                None if record.to_millis == MAX_MILLIS else record.end,
                record.only_stream,
            )
            version = NO_TABLE if record.dead_letters is None else record.dead_letters
            page_records = self._pipeline.settings.retrieval.max_records
            found = DeadLetterRecords(uri, options, version, selection, page_records=page_records)
            self._opened = wanted, found
        return self._opened[1]
