"""Replay a time range of the streams, or dead letters.

1. The options become a `ReplayRecord`, and the pipeline of the replay is derived from the pipeline.
2. A time range is replayed by a KCL application of its own (`RangeReplay`). Its leases and the
   positions in the table have its name. So each record of the range lands exactly once per replay,
   also if the replay was killed and is continued with its id. The DynamoDB tables of the pipeline
   are not written, and those of the replay are deleted at its end.
3. Dead letters are replayed by this process, chunk by chunk (`LettersReplay`).
4. Both have the same plan and result, which are said in sentences and as JSON.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast
from uuid import uuid4

import pyarrow as pa

from kcl_pipeline.aws import delete_tables, open_kinesis, open_tables
from kcl_pipeline.batch import (
    Batch,
    Chunk,
    DataFile,
    dead_letter_address,
    payload_bytes,
)
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.control.application import is_held
from kcl_pipeline.control.context import OperationContext
from kcl_pipeline.control.seek import duration_seconds, past_millis, position_sink
from kcl_pipeline.delta.dead_letters import (
    NO_TABLE,
    DeadLetterRecords,
    Selection,
    mark_records,
    open_dead_letters,
)
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.delta.storage import table_root
from kcl_pipeline.errors import (
    ApplicationInUseError,
    NotFoundError,
    SettingsError,
    SinkError,
    TransformFailedError,
)
from kcl_pipeline.events import DeadLettersUnreadable
from kcl_pipeline.kinesis.client import ARRIVAL_TOLERANCE
from kcl_pipeline.leases.application import ReplayRecord
from kcl_pipeline.leases.layout import ensure_client_version
from kcl_pipeline.leases.row import MAX_MILLIS
from kcl_pipeline.position import NOTHING_STORED, TRIM_HORIZON, Position, StoredPosition
from kcl_pipeline.sinks.sink import FileKeepingSink, Positions, Sink
from kcl_pipeline.text import counted, printable
from kcl_pipeline.threads import RetryPolicy, StoppedWhileRetryingError, retry_transient
from kcl_pipeline.worker.batch_runner import WriteSteps
from kcl_pipeline.worker.failures import FailureLimits, dead_letters
from kcl_pipeline.worker.isolation import IsolationStoppedError
from kcl_pipeline.worker.summary import StopReason

if TYPE_CHECKING:
    from kcl_pipeline.delta.dead_letters import DeadLetterPage, DeadLetterShard

STOPPED: Final = "it was stopped"
_T = TypeVar("_T")

# -- 1. the options, and the pipeline of the replay

_ID: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
MAX_BATCH_RECORDS: Final = 10_000
"""Most dead letters of a batch: all of them may fail again, and each has to be isolated."""
_OF_ARGUMENTS: Final = ("application_name", "streams", "stream_settings", "selects_streams")
_OF_TABLE: Final = ("table_name", "deletion_protection_enabled", "point_in_time_recovery_enabled")
_NOT_SHARED: Final[Mapping[str, tuple[str, ...]]] = {
    "lease_table": _OF_TABLE,
    "worker_metrics_table": _OF_TABLE,
    "coordinator_state_table": _OF_TABLE,
    "assignment": (
        "max_leases_for_worker",
        "max_leases_for_group",
        "max_throughput_per_host_kbps",
        "max_throughput_per_group_kbps",
    ),
    "shard_sync": ("former_streams", "former_streams_leases_deletion_strategy"),
    "retrieval": ("consumer_name", "consumer_arns", "retrieval_mode"),
}
"""By group, settings of the pipeline that a replay does not have.

It polls, because only then a time range can be read, and one worker may hold all leases. Its tables
have default names, so that it never uses those of the pipeline.
"""


class ReplayOptions(Protocol):
    """The options of a replay: the `ReplayRequest` of an operator."""

    @property
    def replay_id(self) -> str | None:
        """Identity of the replay. None: a new one is drawn."""

    @property
    def from_time(self) -> str | None:
        """First time (inclusive): with an offset, or before now."""

    @property
    def to_time(self) -> str | None:
        """Last time (exclusive), likewise. None: now."""

    @property
    def into(self) -> str | None:
        """Address of a side table."""

    @property
    def in_place(self) -> bool:
        """Write to the table of the pipeline."""

    @property
    def only_stream(self) -> str | None:
        """Name or ARN of the only stream. None: all streams."""

    @property
    def dead_letters(self) -> bool:
        """Replay dead letters. The times are those of their failures."""


def replay_record(request: ReplayOptions, now_seconds: float) -> ReplayRecord:
    """Return the record of a new replay.

    Args:
        request: The options.
        now_seconds: Current time in epoch seconds.

    Raises:
        SettingsError: An option is missing or wrong.
    """
    if request.from_time is None and not request.dead_letters:
        raise SettingsError(
            "--from is missing; write a time such as 2026-11-23T09:00:00Z, or a time before now "
            "such as 10m"
        )
    if request.into is None and not request.in_place:
        raise SettingsError(
            "the table is missing; write --into ADDRESS for a side table, or --in-place for "
            "the table of the pipeline"
        )
    begin = past_millis("--from", request.from_time, now_seconds) if request.from_time else 0
    # A clock of a worker may be ahead of this one: without --to, no dead letter is left out
    end = MAX_MILLIS if request.dead_letters else int(now_seconds * 1000)
    if request.to_time is not None:
        end = past_millis("--to", request.to_time, now_seconds)
    if begin >= end:
        raise SettingsError(f"--from {request.from_time} is not before --to {request.to_time}")
    return ReplayRecord(begin, end, request.into, request.only_stream)


def check_options(request: ReplayOptions, record: ReplayRecord, now_seconds: float) -> None:
    """Check that the options fit the replay that is continued.

    A time before now, such as `10m`, counts from the begin of the replay: it is not compared.

    Raises:
        SettingsError: They do not.
    """

    def millis(option: str, text: str | None) -> int | None:
        is_compared = text is not None and duration_seconds(text) is None
        return past_millis(option, str(text), now_seconds) if is_compared else None

    for option, given, expected in (
        ("--from", millis("--from", request.from_time), record.from_millis),
        ("--to", millis("--to", request.to_time), record.to_millis),
        ("--into", request.into, record.into),
        ("--in-place", request.in_place or None, record.into is None),
        ("--only-stream", request.only_stream, record.only_stream),
    ):
        if given is not None and given != expected:
            raise SettingsError(
                f"{option} differs from the replay {request.replay_id!r}, which was begun before; "
                "omit all options but the id to continue it, or write another id"
            )


def replay_id_of(request: ReplayOptions) -> str:
    """Return the id of the options, or a new one."""
    if request.into is not None and request.in_place:
        raise SettingsError("--into and --in-place are both given; write one of them")
    if request.replay_id is not None and not _ID.fullmatch(request.replay_id):
        raise SettingsError(
            f"the id '{printable(request.replay_id)}' is not usable; write 1 to 32 of the "
            "characters a-z 0-9 -, such as 'late-orders'"
        )
    return request.replay_id or uuid4().hex[:8]


def replay_pipeline(
    pipeline: Any,
    name: str,
    record: ReplayRecord,
    streams: Sequence[str],
    *,
    of_letters: bool = False,
) -> Any:
    """Return the pipeline of a replay: another application, the same transform.

    Args:
        pipeline: The `KinesisPipeline`.
        name: Application name of the replay.
        record: What is replayed.
        streams: Names or ARNs of the streams.
        of_letters: Whether dead letters are replayed, which this process reads by itself.

    Raises:
        SettingsError: The side table is not possible.
    """
    settings = pipeline.settings.model_dump(exclude_unset=True)
    settings = _without(settings, (*_OF_ARGUMENTS, "metrics"))
    for group, names in _NOT_SHARED.items():
        settings[group] = _without(settings.get(group, {}), names)
    if of_letters:
        most = min(pipeline.settings.batch.max_batch_records, MAX_BATCH_RECORDS)
        # A record that fails again becomes a dead letter again, also if all of them fail.
        batch = {
            "max_batch_records": most,
            "failed_records": "dead_letter",
            "max_dead_letter_share": 1.0,
            "max_dead_letters_per_batch": most,
        }
        read: dict[str, Any] = {"arrived_from": None, "arrived_before": None, "fetch_on": "driver"}
        settings["batch"] = settings.get("batch", {}) | batch
    else:
        read = {"arrived_from": record.begin, "arrived_before": record.end}
        settings["shard_sync"] |= {
            "initial_position_in_stream": "AT_TIMESTAMP",
            "initial_timestamp": record.begin - ARRIVAL_TOLERANCE,
        }
    settings["retrieval"] |= read
    sink = pipeline.sink if record.into is None else _side_table(pipeline.sink, record.into)
    return replace(
        pipeline, name=name, streams=list(streams), sink=sink, settings_overrides=settings
    )


def _side_table(sink: Any, into: str) -> DeltaSink:
    if not isinstance(sink, DeltaSink):
        raise SettingsError(
            f"--into needs a DeltaSink: the function of the {type(sink).__name__} chooses its "
            "table; write --in-place"
        )
    if table_root(into) in (table_root(sink.uri), table_root(sink.dead_letters)):
        raise SettingsError(
            f"--into {into} is the table of the pipeline or of its dead letters; write another "
            "address, or --in-place"
        )
    return replace(sink, uri=into, dead_letter_uri=None)


def _without(values: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """A replay that can be run.

    Attributes:
        replay_id: Its id.
        name: Name of its application; of dead letters, of its entry in the table.
        record: What is replayed.
        streams: Names or ARNs of the streams.
        table: Address of the table. None: a function as the sink chooses it.
        is_continued: Whether an earlier run began it.
        shards: By stream, the number of shards that a dry run has found.
        letters: The records of one version of the dead-letter table. None: a time range.
        chunks: Their pages, in the order in which they are replayed.
        landed: Number of chunks that are in the output.
    """

    replay_id: str
    name: str
    record: ReplayRecord
    streams: tuple[str, ...]
    table: str | None
    is_continued: bool = False
    shards: Mapping[str, int] = field(default_factory=dict)
    letters: DeadLetterRecords | None = None
    chunks: tuple[tuple[DeadLetterShard, DeadLetterPage], ...] = ()
    landed: int = 0


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a run of a replay.

    Attributes:
        plan: The replay.
        error: Why it is not complete. None: all records have landed.
        records: Records that this run has transformed and committed.
        rows: Rows that it has added to the output.
        failed: Records that became dead letters.
        marked: Rows of the dead-letter table that it has marked. None: none is to be marked.
    """

    plan: ReplayPlan
    error: str | None = None
    records: int = 0
    rows: int = 0
    failed: int = 0
    marked: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all records have landed, and are marked."""
        return self.error is None


# -- 2. a time range

SETTLE_SECONDS: Final = 5.0
"""Time from the end of the range to the start, until which its last records can be read."""
END_KEY: Final = "replay"
"""In place of a shard: its end in the table says that the replay has ended."""


class RangeReplay:
    """Replays a time range of the streams of one pipeline.

    The tables of its application are only read.

    Args:
        context: The application, the pipeline, and who gets the events and the progress.
    """

    def __init__(self, context: OperationContext) -> None:
        self._context = context
        self._app = context.control
        self._pipeline = context.pipeline
        self._clients = context.clients
        self._clock = self._app.clock

    def plan(self, request: ReplayOptions) -> ReplayPlan:
        """Return the replay that the options mean. Writes nothing.

        Raises:
            SettingsError: An option is missing or wrong, or the replay has ended.
            AwsError: The tables cannot be read.
        """
        replay_id = replay_id_of(request)
        name = f"{self._app.name}-replay-{replay_id}"
        now = self._clock.wall()
        found = None if request.replay_id is None else self._recorded(name)
        if found is not None:
            check_options(request, found, now)
        record = found or replay_record(request, now)
        streams = self._streams(record.only_stream)
        plan = ReplayPlan(replay_id, name, record, streams, None, found is not None)
        sink = self._derived(plan).sink
        if found is None and self._has_ended(plan, sink):
            raise SettingsError(
                f"the replay {replay_id!r} has ended, and its records are in the table; write "
                "another id to replay records once more"
            )
        return replace(plan, table=getattr(sink, "uri", None))

    def with_shards(self, plan: ReplayPlan) -> ReplayPlan:
        """Return the plan with how many shards of each stream were open at the begin."""
        settings = self._derived(plan).settings
        kinesis = open_kinesis(settings, self._clients(settings), self._clock)
        multi_stream, begin = settings.is_multi_stream, plan.record.begin
        streams = [kinesis.resolve_stream(one, multi_stream=multi_stream) for one in plan.streams]
        shards = {one.name: len(kinesis.list_shards(one, "AT_TIMESTAMP", begin)) for one in streams}
        return replace(plan, shards=shards)

    def run(self, plan: ReplayPlan, progress_seconds: float = 10.0) -> Replayed:
        """Replay the records, and delete the tables of the replay when all have landed.

        Several processes may run the same replay; they share its shards. A run that was stopped
        can be continued with the id of the replay.

        Args:
            plan: The replay.
            progress_seconds: Minimum time between two progress reports.

        Raises:
            ApplicationInUseError: Another process begins a replay of this id.
            KclError: As `KinesisPipeline.build_worker`.
        """
        clock, derived = self._clock, self._derived(plan)
        clients = self._clients(derived.settings)
        events, stop = self._context.events, self._context.stop or clock.signal()
        worker_id = f"replay-{uuid4().hex[:8]}"
        try:
            derived.ensure_tables(clients=clients, clock=clock, events=events, stop=stop)
            record = self._begin(plan, derived, worker_id)
            if record.complete or self._has_ended(plan, derived.sink):
                return self._end(plan, derived)
            # The last records of the range can be read a moment after its end
            left = record.to_millis / 1000 + SETTLE_SECONDS - clock.wall()
            stop.wait(min(max(left, 0.0), SETTLE_SECONDS))
            worker = derived.build_worker(
                worker_id,
                session_factory=self._context.session_factory,
                clients=clients,
                clock=clock,
                events=events,
                stop=stop,
                run_id=f"{worker_id}@{round(clock.wall() * 1000)}",
            )
            done = worker.run(
                stop,
                mode="drain",
                on_progress=self._context.on_progress,
                progress_seconds=progress_seconds,
            )
            total = done.total
            counts = (total.records, total.rows, total.dead_letters)
            if done.reason is not StopReason.DRAINED:
                is_stopped = done.reason is StopReason.STOPPED
                why = done.error or (STOPPED if is_stopped else str(done.reason))
                return Replayed(plan, why, *counts)
            tables = open_tables(derived.settings, clients, clock)
            if any(is_held(lease) for lease in tables.lease.list_leases().leases):
                why = "another process still runs this replay, or was killed; continue it later"
                return Replayed(plan, why, *counts)
            ended = self._end(plan, derived)
            return replace(ended, records=counts[0], rows=counts[1], failed=counts[2])
        except StoppedWhileRetryingError:
            return Replayed(plan, STOPPED)
        except NotFoundError:
            if not self._has_ended(plan, derived.sink):
                raise
            # The process that ended the replay has deleted its tables.
            return Replayed(plan)

    def _begin(self, plan: ReplayPlan, derived: Any, worker_id: str) -> ReplayRecord:
        """Record what is replayed, so that a later run continues with the same range."""
        settings = derived.settings
        table = open_tables(settings, self._clients(settings), self._clock).coordinator
        ensure_client_version(table, worker_id, self._clock)
        found = table.read_replay()
        if found is None and not plan.is_continued:
            if table.put_replay(plan.record, replacing=None):
                return plan.record
            found = table.read_replay()
        if found is None or replace(found, complete=False) != replace(plan.record, complete=False):
            raise ApplicationInUseError(
                f"another process begins or ends the replay {plan.replay_id!r} at this moment; "
                "try again"
            )
        return found

    def _end(self, plan: ReplayPlan, derived: Any) -> Replayed:
        """Note the end where a later run finds it, then delete the tables.

        In this order a run that was killed in between is continued by the deletion, and never
        begins again.
        """
        settings = derived.settings
        clients = self._clients(settings)
        table = open_tables(settings, clients, self._clock).coordinator
        found = table.read_replay()
        if found is not None and not found.complete:
            table.put_replay(replace(found, complete=True), replacing=found)
        sink = position_sink(derived.sink, plan.name)
        if sink is not None:
            positions = sink.positions([END_KEY])
            stored = positions.shards[END_KEY]
            if positions.table_id is not None and not stored.ended:
                ended = {END_KEY: stored.moved(None, ended=True)}
                sink.commit(positions.table_id, (), positions.shards, ended)
        # The coordinator state, which says what the tables are, is the last one
        names = (
            settings.lease_table_name,
            settings.worker_metrics_table_name,
            settings.coordinator_state_table_name,
        )
        delete_tables(clients, names)
        return Replayed(plan)

    def _has_ended(self, plan: ReplayPlan, sink: Any) -> bool:
        """Return whether the table shows that the replay has ended.

        A process that planned the replay before another one ended it finds no tables, and has
        created them again.
        """
        table = position_sink(sink, plan.name)
        return table is not None and table.positions([END_KEY]).shards[END_KEY].ended

    def _recorded(self, name: str) -> ReplayRecord | None:
        # only the names of the tables matter here
        settings = ConsumerSettings(application_name=name, streams=("-",))
        tables = open_tables(settings, self._clients(settings), self._clock)
        try:
            return tables.coordinator.read_replay()
        except NotFoundError:
            return None

    def _derived(self, plan: ReplayPlan) -> Any:
        return replay_pipeline(self._pipeline, plan.name, plan.record, plan.streams)

    def _streams(self, only: str | None) -> tuple[str, ...]:
        settings = self._app.settings
        names = settings.streams
        if settings.selects_streams:
            record = self._app.coordinator.read_application()
            names = () if record is None else tuple(one.arn for one in record.identity.streams)
        found = tuple(one for one in names if only in (None, one, one.rpartition("/")[2]))
        if not found:
            raise SettingsError(
                f"the application {self._app.name!r} reads no stream {printable(only or '')}"
                if only
                else f"no streams are recorded for the application {self._app.name!r}"
            )
        return found


# -- 3. dead letters

KEY: Final = "dead-letters"
"""In place of a shard: the entry of the replay in the output, and the lease key of its failures."""
_DIGEST_BITS: Final = 28
"""Bits of a sub-sequence number in a table."""
_WRITING: Final = RetryPolicy(
    20.0, first_wait_seconds=0.2, longest_wait_seconds=5.0, transient=(SinkError,)
)


class LettersReplay:
    """Replays the dead letters of one pipeline: transforms them once more, and marks them.

    No table in DynamoDB is needed, and Kinesis is not read. One version of the dead-letter table
    is cut into chunks. For each chunk:

    1. Its records are transformed, and the files are written. Records that fail again become dead
       letters again, at least once, as those of a worker.
    2. One commit to the output adds the files and sets the entry of the replay: how many chunks
       have landed, and of which version of the dead-letter table. A chunk without a row does not
       create the output. Its entry is set when a later chunk has created it.
    3. One commit to the dead-letter table marks the rows of the chunk as replayed.

    A run that ends in between is continued with the same id. The entry in the output says which
    chunk is next, so no chunk lands twice. The last chunk that landed is marked first: it may be
    the one whose step 3 is missing. To mark rows again changes nothing.

    Args:
        context: The pipeline, and who gets the events and the progress.
        rng: Spreads waits, and chooses samples of a chunk that fails.
    """

    def __init__(self, context: OperationContext, rng: random.Random) -> None:
        self._context = context
        self._pipeline = pipeline = context.pipeline
        self._clock = clock = context.control.clock
        self._rng = rng
        self._stop = context.stop or clock.signal()
        address = dead_letter_address(pipeline.sink)
        if address is None:
            raise SettingsError(
                "the sink of the pipeline has no dead-letter table; set its dead_letter_uri"
            )
        self._table = table_root(address), pipeline.sink.storage_options

    def plan(self, request: ReplayOptions) -> ReplayPlan:
        """Return the replay that the options mean. Writes nothing.

        Raises:
            SettingsError: An option is missing or wrong, or differs from that of an earlier run.
            SinkError: A table cannot be read.
        """
        replay_id = replay_id_of(request)
        name = f"{self._pipeline.name}-replay-{replay_id}"
        record = replay_record(request, self._clock.wall())
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
        plan = ReplayPlan(
            replay_id,
            name,
            record,
            tuple(letters.streams),
            getattr(sink, "uri", None),
            stored.number > 0,
            letters.streams,
            letters,
            tuple((shard, page) for shard in letters.shards for page in shard.pages),
            stored.number,
        )
        if stored.position not in (None, _entry_position(plan)):
            raise SettingsError(
                f"the options differ from those of the replay {replay_id!r}, which was begun "
                "before; write the same ones to continue it (a time before now, such as 10m, is "
                "another one now), or another id"
            )
        return plan

    def run(self, plan: ReplayPlan, progress_seconds: float = 10.0) -> Replayed:
        """Replay the chunks that have not landed yet.

        Several processes may run the same replay: a chunk lands once. A stop ends the run after
        the current chunk.

        Args:
            plan: The replay.
            progress_seconds: Shortest time between two sentences about the progress.
        """
        letters = _letters_of(plan)
        if letters.unreadable:
            self._context.events(
                DeadLettersUnreadable(letters.root, letters.unreadable, letters.example)
            )
        marks = plan.record.into is None
        time = datetime.fromtimestamp(self._clock.wall(), UTC)
        records = rows = failed = marked = landed = 0
        error = None
        next_line = self._clock.monotonic() + progress_seconds
        try:
            for number, part in self._land(plan):
                landed = number + 1
                if marks:
                    names = letters.named(*plan.chunks[number])
                    mark = partial(mark_records, *self._table, names, time)
                    marked = self._retry("mark dead letters as replayed", mark)
                if part is not None:
                    records += plan.chunks[number][1].records
                    rows += part.output_rows
                    failed += sum(each.num_rows for each in part.failed.values())
                if self._clock.monotonic() >= next_line:
                    next_line = self._clock.monotonic() + progress_seconds
                    text = f"{landed} of {len(plan.chunks)} chunks of dead letters have landed"
                    self._context.say(text)
        except (SinkError, TransformFailedError, StoppedWhileRetryingError) as failure:
            error = str(failure)
        except IsolationStoppedError:
            error = STOPPED
        if error is None and landed < len(plan.chunks):
            error = STOPPED
        return Replayed(plan, error, records, rows, failed, marked if marks else None)

    def _land(self, plan: ReplayPlan) -> Iterator[tuple[int, Batch | None]]:
        """Land chunk after chunk. The caller marks each one before the next begins.

        Yields:
            The number of a chunk that is in the output, and what this run has committed. None: an
            earlier run or another process has landed it, and may not have marked it.
        """
        if plan.landed:
            yield plan.landed - 1, None
        if plan.landed >= len(plan.chunks):
            return
        context, derived = self._context, self._derived(plan.name, plan.record)
        settings = derived.settings
        writer, sink, _ = derived.output().open(
            context.session_factory, context.clients(settings), context.events
        )
        limits = FailureLimits(settings.batch)
        steps = WriteSteps(writer, limits, lambda loaded: loaded, self._rng, self._stop.is_set)
        table = sink.positions([KEY])
        stored = table.shards[KEY]
        while stored.number < len(plan.chunks) and not self._stop.is_set():
            number = stored.number
            batch = _batch(plan, number)
            paused: dict[str, str] = {}
            done = list(steps.run(batch, paused.update))
            if paused:
                raise TransformFailedError("; ".join(paused.values()))
            (part,) = done  # one lease makes one part
            if table.table_id is None and part.output_schema is not None:
                sink.ensure(part.output_schema)
                table = self._with_entry(sink, plan, number)
                if not (isinstance(sink, FileKeepingSink) and sink.has_files(part.written_files)):
                    continue  # the files are written again, into the table
            if part.failed:
                failed = dead_letters(part.failed, batch.batch_id, self._clock.wall())
                sink.write_dead_letters(failed)
            becomes = stored.moved(_entry_position(plan))
            # Without a table no record of a chunk has made a row up to now
            if table.table_id is None or self._commit(
                sink, table.table_id, part.written_files, stored, becomes, part.output_schema
            ):
                yield number, part
                stored = becomes
                continue
            table = sink.positions([KEY])
            stored = table.shards[KEY]
            if stored.position != becomes.position or stored.number <= number:
                raise ApplicationInUseError(
                    f"another process begins the replay {plan.replay_id!r} at this moment, or the "
                    "output was replaced; run the command again"
                )
            yield stored.number - 1, None  # another process of this replay was faster

    def _with_entry(self, sink: Sink, plan: ReplayPlan, number: int) -> Positions:
        """Set the entry for the chunks before this one, none of which has made a row.

        Returns:
            What the table has now. Another process may have set it, too.
        """
        position = _entry_position(plan)
        while True:
            table = sink.positions([KEY])
            stored = table.shards[KEY]
            is_other = stored.position not in (None, position)
            if table.table_id is None or is_other or stored.number >= number:
                return table
            becomes = stored.moved(position)
            self._commit(sink, table.table_id, (), stored, becomes)

    def _commit(
        self,
        sink: Sink,
        table_id: str,
        files: Sequence[DataFile],
        expected: StoredPosition,
        becomes: StoredPosition,
        schema: pa.Schema | None = None,
    ) -> bool:
        call = partial(sink.commit, table_id, files, {KEY: expected}, {KEY: becomes}, schema)
        return self._retry("commit a chunk of dead letters", call).version is not None

    def _retry(self, name: str, call: Callable[[], _T]) -> _T:
        events = self._context.events
        return retry_transient(name, call, self._clock, self._rng, events, self._stop, _WRITING)

    def _derived(self, name: str, record: ReplayRecord) -> Any:
        return replay_pipeline(self._pipeline, name, record, (KEY,), of_letters=True)


def _letters_of(plan: ReplayPlan) -> DeadLetterRecords:
    return cast("DeadLetterRecords", plan.letters)


def _entry_position(plan: ReplayPlan) -> Position:
    """Return the entry of the output: version of the dead-letter table, and what selects."""
    letters = _letters_of(plan)
    digest = zlib.crc32(repr((plan.record, letters.page_records)).encode()) % 2**_DIGEST_BITS
    return Position(str(max(letters.version, 0)), digest)


def _batch(plan: ReplayPlan, number: int) -> Batch:
    records: pa.Table = _letters_of(plan).read(*plan.chunks[number])
    last = records.slice(records.num_rows - 1).to_pylist()[0]
    through = Position(last["sequence_number"], last["sub_sequence_number"])
    part = Chunk(KEY, records, TRIM_HORIZON, through, payload_bytes(records))
    return Batch(f"{plan.name}/{number}", (part,), records)


# -- 4. what is said


def plan_sentences(plan: ReplayPlan, *, dry_run: bool = False) -> list[str]:
    """What a replay reads and writes."""
    record, letters = plan.record, plan.letters
    verb = "continue" if plan.is_continued else "begin"
    lines = [f"the replay {plan.replay_id} {f'would {verb}' if dry_run else f'{verb}s'}"]
    begin, end = _times(plan)
    if letters is None:
        lines[0] += f": application {plan.name}"
        streams = ", ".join(plan.streams)
        lines.append(f"records of {streams} that arrived from {begin} to {end} (exclusive)")
        counts, once = "at the begin of the range", "once more"
        no_mark, of = "", "its rows are repeated"
    else:
        of_stream = f" of the stream {record.only_stream}" if record.only_stream else ""
        failed = ", which failed" if begin or end else ""
        failed += (f" from {begin}" if begin else "") + (f" before {end}" if end else "")
        lines.append(
            f"{counted(letters.records, 'dead letter')}{of_stream} in {letters.root} not marked as "
            f"replayed{failed}"
        )
        if plan.is_continued:
            lines.append(f"{plan.landed} of {len(plan.chunks)} chunks have landed before")
        counts, once = "with dead letters", "once"
        no_mark, of = (
            ", and no dead letter is marked",
            "then the dead letters are marked as replayed",
        )
    if record.into is not None:
        lines.append(
            f"each record lands {once} in the side table {record.into}; the table of the pipeline "
            f"is not written{no_mark}"
        )
    elif plan.table is None:
        lines.append(f"the function of the pipeline receives each record at least once; {of}")
    else:
        lines.append(f"each record lands {once} in {plan.table}, the table of the pipeline; {of}")
    if letters is not None and letters.unreadable:
        lines.append(
            f"{counted(letters.unreadable, 'row')} cannot be replayed: a column of the record is "
            f"null, or its position is wrong; one of them has {letters.example}"
        )
    if dry_run:
        shards = (f"{name}: {counted(n, 'shard')} {counts}" for name, n in plan.shards.items())
        lines += ["; ".join(shards)] if plan.shards else []
        lines.append("dry run: nothing was written")
    return lines


def _times(plan: ReplayPlan) -> tuple[str | None, str | None]:
    """Return the begin and the end; None where there is no limit."""
    record = plan.record
    begin, end = (one.isoformat(timespec="milliseconds") for one in (record.begin, record.end))
    return begin if record.from_millis else None, end if record.to_millis < MAX_MILLIS else None


def sentences(done: Replayed) -> list[str]:
    """What a run of a replay has achieved."""
    name, letters = done.plan.replay_id, done.plan.letters
    counts = (
        f"{counted(done.records, 'record')} replayed, {counted(done.rows, 'row')} written and "
        f"{counted(done.failed, 'record')} failed{' again' if letters else ''} in this run"
    )
    lines = [counts]
    if done.marked is not None:
        lines.append(f"{counted(done.marked, 'dead letter')} marked as replayed")
    if done.is_complete:
        tables = "" if letters else "; its DynamoDB tables are deleted"
        return [*lines, f"the replay {name} is complete{tables}"]
    options = "the same options and " if letters else ""
    return [
        *lines,
        f"the replay {name} is not complete: {done.error}",
        f"continue it with {options}the id {name}; nothing lands twice",
    ]


def plan_as_dict(plan: ReplayPlan) -> dict[str, Any]:
    """A replay for JSON output."""
    letters = plan.letters
    begin, end = _times(plan)
    return {
        "replay_id": plan.replay_id,
        "application": plan.name,
        "streams": list(plan.streams),
        "from": begin,
        "to": end,
        "into": plan.record.into,
        "in_place": plan.record.into is None,
        "is_continued": plan.is_continued,
        "shards": dict(plan.shards),
        "dead_letters": None
        if letters is None
        else {
            "table": letters.root,
            "version": letters.version,
            "records": letters.records,
            "unreadable": letters.unreadable,
        },
    }


def as_dict(done: Replayed) -> dict[str, Any]:
    """The result of a run for JSON output."""
    return {
        **plan_as_dict(done.plan),
        "is_complete": done.is_complete,
        "error": done.error,
        "marked": done.marked,
        "run": {"records": done.records, "rows_written": done.rows, "dead_letters": done.failed},
    }
