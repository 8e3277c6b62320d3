"""Replay dead letters: transform them once more, chunk by chunk, and mark them.

No table in DynamoDB is needed, and Kinesis is not read. One version of the dead-letter table is
cut into chunks. For each chunk:

1. Its records are transformed, and the files are written. Records that fail again become dead
   letters again, at least once, as those of a worker.
2. One commit to the output adds the files and sets the entry of the replay: how many chunks have
   landed, and of which version of the dead-letter table. A chunk without a row does not create the
   output. Its entry is set when a later chunk has created it.
3. One commit to the dead-letter table marks the rows of the chunk as replayed.

A run that ends in between is continued with the same id. The entry in the output says which chunk
is next, so no chunk lands twice. The last chunk that landed is marked first: it may be the one
whose step 3 is missing. To mark rows again changes nothing.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import pyarrow as pa

from kcl_pipeline.batch import (
    NOTHING_WRITTEN,
    Batch,
    BatchWriter,
    ShardRange,
    Written,
    dead_letter_address,
)
from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.control.replay.pipeline import MAX_BATCH_RECORDS, replay_pipeline
from kcl_pipeline.control.sinks import position_sink
from kcl_pipeline.delta.address import table_root
from kcl_pipeline.delta.dead_letters import (
    NO_TABLE,
    DeadLetterRecords,
    Selection,
    mark_records,
    open_dead_letters,
)
from kcl_pipeline.errors import (
    ApplicationInUseError,
    SettingsError,
    SinkError,
    TransformFailedError,
)
from kcl_pipeline.events import DeadLettersUnreadable, EventSink, ignore_events
from kcl_pipeline.leases.application.replay_record import ReplayRecord
from kcl_pipeline.leases.attributes import MAX_MILLIS
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.sinks.sink import CommitOutcome, Entry, FileKeepingSink, Positions, Sink
from kcl_pipeline.sinks.stored import NOTHING_STORED, StoredPosition
from kcl_pipeline.worker.batch_runner import WriteSteps
from kcl_pipeline.worker.failures import (
    FailureLimits,
    IsolationStoppedError,
    SplitBatch,
    dead_letters,
)
from kcl_pipeline.worker.retry import RetryPolicy, StoppedWhileRetryingError, retry_transient
from kcl_pipeline.worker.sources import SourcedBatch

if TYPE_CHECKING:
    from kcl_pipeline.aws import AwsClients
    from kcl_pipeline.config import ConsumerSettings
    from kcl_pipeline.control.replay.request import ReplayRequest
    from kcl_pipeline.delta.dead_letters import DeadLetterPage, DeadLetterShard

KEY: Final = "dead-letters"
"""In place of a shard: the entry of the replay in the output, and the lease key of its failures."""
STOPPED: Final = "it was stopped"
_DIGEST_BITS: Final = 28
"""Bits of a sub-sequence number in a table."""
_WRITING: Final = RetryPolicy(
    20.0, first_wait_seconds=0.2, longest_wait_seconds=5.0, transient=(SinkError,)
)

Chunk = tuple["DeadLetterShard", "DeadLetterPage"]


@dataclass(frozen=True, slots=True)
class LettersPlan:
    """A replay of dead letters that can be run.

    Attributes:
        replay_id: Its id.
        name: What stands for the application in the entry of the output.
        record: Which records are replayed, and where they go.
        letters: The records of one version of the dead-letter table.
        chunks: They are replayed in this order.
        landed: Number of chunks that are in the output.
        table: Address of the output. None: a function as the sink chooses it.
    """

    replay_id: str
    name: str
    record: ReplayRecord
    letters: DeadLetterRecords
    chunks: tuple[Chunk, ...]
    landed: int
    table: str | None

    @property
    def is_continued(self) -> bool:
        """Whether an earlier run of this replay has landed a chunk."""
        return self.landed > 0

    @property
    def position(self) -> Position:
        """The entry of the output: version of the dead-letter table, and what selects records."""
        text = repr((self.record, self.letters.page_records))
        digest = zlib.crc32(text.encode()) % 2**_DIGEST_BITS
        return Position(str(max(self.letters.version, 0)), digest)


@dataclass(frozen=True, slots=True)
class LettersReplayed:
    """The result of a run.

    Attributes:
        plan: The replay.
        records: Records that this run has transformed and committed.
        rows: Rows that it has added to the output.
        failed: Records that failed again.
        marked: Rows of the dead-letter table that it has marked. None: a side table marks none.
        error: Why the replay is not complete. None: it is.
    """

    plan: LettersPlan
    records: int
    rows: int
    failed: int
    marked: int | None
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every chunk has landed and is marked."""
        return self.error is None


class LettersReplay:
    """Replays the dead letters of one pipeline.

    Args:
        pipeline: The `KinesisPipeline`.
        clock: The time.
        rng: Spreads waits, and chooses samples of a chunk that fails.
    """

    def __init__(self, pipeline: Any, clock: Clock, rng: random.Random) -> None:
        self._pipeline = pipeline
        self._clock = clock
        self._rng = rng
        address = dead_letter_address(pipeline.sink)
        if address is None:
            raise SettingsError(
                "the sink of the pipeline has no dead-letter table; set its dead_letter_uri"
            )
        self._table = table_root(address), pipeline.sink.storage_options

    def plan(self, request: ReplayRequest) -> LettersPlan:
        """Return the replay that the options mean. Writes nothing.

        Raises:
            SettingsError: An option is missing or wrong, or differs from that of an earlier run.
            SinkError: A table cannot be read.
        """
        replay_id = request.replay_id or uuid4().hex[:8]
        name = f"{self._pipeline.name}-replay-{replay_id}"
        record = request.record(self._clock.wall())
        sink = self._derived(name, record).sink
        committer = position_sink(sink, name)
        stored = NOTHING_STORED if committer is None else committer.positions([KEY]).shards[KEY]
        if stored.position is None:
            found = open_dead_letters(*self._table)
            version = NO_TABLE if found is None else found.version()
        else:
            version = int(stored.position.sequence_number)
        selection = Selection(
            record.begin if record.from_millis else None,
            record.end if record.to_millis < MAX_MILLIS else None,
            record.only_stream,
        )
        most = min(self._pipeline.settings.batch.max_batch_records, MAX_BATCH_RECORDS)
        letters = DeadLetterRecords(*self._table, version, selection, page_records=most)
        chunks = tuple((shard, page) for shard in letters.shards for page in shard.pages)
        plan = LettersPlan(
            replay_id, name, record, letters, chunks, stored.number, getattr(sink, "uri", None)
        )
        if stored.position not in (None, plan.position):
            raise SettingsError(
                f"the options differ from those of the replay {replay_id!r}, which was begun "
                "before; write the same ones to continue it (a time before now, such as 10m, is "
                "another one now), or another id"
            )
        return plan

    def run(
        self,
        plan: LettersPlan,
        stop: StopSignal,
        clients: Callable[[ConsumerSettings], AwsClients],
        *,
        session_factory: Any = None,
        events: EventSink = ignore_events,
        say: Callable[[str], None] = lambda _: None,
        progress_seconds: float = 10.0,
    ) -> LettersReplayed:
        """Replay the chunks that have not landed yet.

        Several processes may run the same replay: a chunk lands once.

        Args:
            plan: The replay.
            stop: Ends the run after the current chunk.
            clients: Makes the boto3 clients, for a transform that runs on executors.
            session_factory: Makes the Spark session. None: by `spark_config`.
            events: Receives what is reported.
            say: Receives a sentence about the progress.
            progress_seconds: Shortest time between two of them.
        """
        letters = plan.letters
        if letters.unreadable:
            events(DeadLettersUnreadable(letters.root, letters.unreadable, letters.example))
        marks = plan.record.into is None
        time = datetime.fromtimestamp(self._clock.wall(), UTC)
        records = rows = failed = marked = landed = 0
        error = None
        next_line = self._clock.monotonic() + progress_seconds
        try:
            for number, part in self._land(plan, stop, clients, session_factory, events):
                landed = number + 1
                if marks:
                    marked = self._mark(plan, number, time, events, stop)
                if part is not None:
                    records += plan.chunks[number][1].records
                    rows += part.written.rows
                    failed += sum(each.num_rows for each in part.failed.values())
                if self._clock.monotonic() >= next_line:
                    next_line = self._clock.monotonic() + progress_seconds
                    say(f"{landed} of {len(plan.chunks)} chunks of dead letters have landed")
        except (SinkError, TransformFailedError, StoppedWhileRetryingError) as failure:
            error = str(failure)
        except IsolationStoppedError:
            error = STOPPED
        if error is None and landed < len(plan.chunks):
            error = STOPPED
        return LettersReplayed(plan, records, rows, failed, marked if marks else None, error)

    def _land(
        self,
        plan: LettersPlan,
        stop: StopSignal,
        clients: Callable[[ConsumerSettings], AwsClients],
        session_factory: Any,
        events: EventSink,
    ) -> Iterator[tuple[int, SplitBatch | None]]:
        """Land chunk after chunk. The caller marks each one before the next begins.

        Yields:
            The number of a chunk that is in the output, and what this run has committed. None: an
            earlier run or another process has landed it, and may not have marked it.
        """
        if plan.landed:
            yield plan.landed - 1, None
        if plan.landed >= len(plan.chunks):
            return
        derived = self._derived(plan.name, plan.record)
        settings = derived.settings
        sink: Sink
        writer, sink, _ = derived.output().open(session_factory, clients(settings), events)

        def commit(table_id: str, written: Written, entry: Entry) -> CommitOutcome:
            return retry_transient(
                "commit a chunk of dead letters",
                partial(sink.commit, table_id, written, [entry]),
                self._clock,
                self._rng,
                events,
                stop,
                _WRITING,
            )

        table = sink.positions([KEY])
        stored = table.shards[KEY]
        while stored.number < len(plan.chunks) and not stop.is_set():
            number = stored.number
            batch = _batch(plan, number)
            part = self._write(writer, batch, settings, stop)
            schema = part.written.schema
            if table.table_id is None and schema is not None:
                sink.ensure(schema)
                table = _with_entry(sink, commit, plan, number)
                if not (isinstance(sink, FileKeepingSink) and sink.has_files(part.written)):
                    continue  # the files are written again, into the table
            if part.failed:
                failed = dead_letters(part.failed, batch.batch_id, self._clock.wall())
                sink.write_dead_letters(failed)
            entry = Entry(KEY, stored, plan.position)
            if table.table_id is not None:  # else no record of a chunk has made a row up to now
                done = commit(table.table_id, part.written, entry)
                if done.version is None:
                    table = sink.positions([KEY])
                    stored = _of_another_process(plan, table, stored)
                    yield stored.number - 1, None
                    continue
            yield number, part
            stored = entry.becomes

    def _write(
        self, writer: BatchWriter, batch: Batch, settings: ConsumerSettings, stop: StopSignal
    ) -> SplitBatch:
        """Transform a chunk, without the records that fail again.

        Raises:
            TransformFailedError: It fails, and no records are at fault.
        """
        limits = FailureLimits(settings.batch)
        steps = WriteSteps(writer, limits, lambda loaded: loaded, self._rng, stop.is_set)
        count = batch.records.num_rows
        (part,) = steps.run(SourcedBatch(batch, (), count, ()))  # one lease makes one part
        if part.paused:
            raise TransformFailedError("; ".join(part.paused.values()))
        return part

    def _mark(
        self, plan: LettersPlan, number: int, time: datetime, events: EventSink, stop: StopSignal
    ) -> int:
        """Mark the rows of a chunk. Return how many rows this run has marked up to now."""
        names = plan.letters.named(*plan.chunks[number])
        return retry_transient(
            "mark dead letters as replayed",
            lambda: mark_records(*self._table, names, time),
            self._clock,
            self._rng,
            events,
            stop,
            _WRITING,
        )

    def _derived(self, name: str, record: ReplayRecord) -> Any:
        return replay_pipeline(self._pipeline, name, record, (KEY,), of_letters=True)


def _batch(plan: LettersPlan, number: int) -> Batch:
    records: pa.Table = plan.letters.read(*plan.chunks[number])
    last = records.slice(records.num_rows - 1).to_pylist()[0]
    through = Position(last["sequence_number"], last["sub_sequence_number"])
    part = ShardRange(KEY, TRIM_HORIZON, through, rows=records.num_rows)
    return Batch(f"{plan.name}/{number}", (part,), records)


def _with_entry(
    sink: Sink,
    commit: Callable[[str, Written, Entry], CommitOutcome],
    plan: LettersPlan,
    number: int,
) -> Positions:
    """Set the entry for the chunks before this one, none of which has made a row.

    Returns:
        What the table has now. Another process may have set it, too.
    """
    while True:
        table = sink.positions([KEY])
        stored = table.shards[KEY]
        is_other = stored.position not in (None, plan.position)
        if table.table_id is None or is_other or stored.number >= number:
            return table
        commit(table.table_id, NOTHING_WRITTEN, Entry(KEY, stored, plan.position))


def _of_another_process(
    plan: LettersPlan, table: Positions, before: StoredPosition
) -> StoredPosition:
    """Return what another process of this replay has landed meanwhile.

    Raises:
        ApplicationInUseError: It replays other records, or the table was replaced.
    """
    stored = table.shards[KEY]
    if stored.position != plan.position or stored.number <= before.number:
        raise ApplicationInUseError(
            f"another process begins the replay {plan.replay_id!r} at this moment, or the output "
            "was replaced; run the command again"
        )
    return stored
