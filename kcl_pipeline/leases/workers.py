"""The worker metrics rows (protocol §2), with the status that each worker of ours reports."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Final

from kcl_pipeline.errors import NotFoundError, UnreadableRowError, WorkerIdTakenError
from kcl_pipeline.leases.row import (
    ENTITY_TYPE,
    MAX_KEY_BYTES,
    MAX_MILLIS,
    REQUIRED,
    Attribute,
    BadRow,
    RowCodec,
    a_name,
    a_whole,
    checked_name,
    float_of,
    int_of,
    list_of,
    map_of,
    name_of,
    number,
    read_rows,
    readable,
    required,
    string,
    text_of,
)
from kcl_pipeline.leases.store import (
    AbsentOrEquals,
    AttributeValue,
    Changes,
    Equals,
    Item,
    Present,
    RowStore,
)
from kcl_pipeline.text import printable
from kcl_pipeline.worker_status import WorkerStatus, status_of, status_text

CPU: Final = "C"
"""Short name of the CPU metric (protocol §2.2)."""

LAST_UPDATE: Final = "lut"
STATS: Final = "sts"
OPERATING_RANGE: Final = "opr"
SUPPORT_CODE: Final = "sup"
SUPPORT_CODE_UPDATE: Final = "slu"
DRAIN: Final = "kclpDrain"
DRAIN_REASON: Final = "kclpDrainReason"
FOR_PAUSE: Final = "pause"
RUN_ID: Final = "kclpRunId"
STATUS: Final = "kclpStatus"
OWN_CPU: Final = "kclpCpu"
REPLACES: Final = "kclpReplaces"
FORMER_RUN: Final = "kclpFormerRun"
FORMER_ENDED: Final = "kclpFormerEnded"
OPTIONAL_ATTRIBUTES: Final = (
    SUPPORT_CODE,
    SUPPORT_CODE_UPDATE,
    DRAIN,
    DRAIN_REASON,
    RUN_ID,
    STATUS,
    OWN_CPU,
    REPLACES,
    FORMER_RUN,
    FORMER_ENDED,
)
"""Attributes that a worker metrics row may have in addition to those of every report."""
WORKER_ENTITY: Final = "WORKER_METRIC_STATS"

MAX_METRICS: Final = 32
"""Largest number of metrics of one worker (our own limit; KCL has five)."""
MAX_METRIC_VALUES: Final = 100
"""Largest number of averages of one metric (our own limit; KCL keeps ten)."""
MAX_METRIC_VALUE: Final = 1e9
"""Largest average or limit of a metric (our own limit; KCL: percentages, -1 for failures)."""


def _averages_of(item: Item, name: str, *, least: float) -> tuple[float, ...]:
    averages = (
        float_of({name: value}, name, least=least, most=MAX_METRIC_VALUE)
        for value in list_of(item, name, MAX_METRIC_VALUES)
    )
    return tuple(value for value in averages if value is not None)


def _lists_of(item: Item, name: str, *, least: float) -> dict[str, tuple[float, ...]]:
    lists = map_of(item, name, MAX_METRICS)
    return {checked_name(one, name): _averages_of(lists, one, least=least) for one in lists}


def _ranges_of(item: Item) -> dict[str, tuple[int, ...]]:
    ranges = _lists_of(item, OPERATING_RANGE, least=0.0)
    return {name: tuple(map(int, values)) for name, values in ranges.items()}


def _numbers(values: Iterable[float]) -> AttributeValue:
    return {"L": [number(value) for value in values]}


def _lists(name: str, lists: Mapping[str, Iterable[float]]) -> Item:
    return {name: {"M": {metric: _numbers(values) for metric, values in lists.items()}}}


_STATS: Final = Attribute(
    STATS,
    lambda item: _lists_of(item, STATS, least=-1.0),
    lambda stats: _lists(STATS, stats),
)
_RANGES: Final = Attribute(
    OPERATING_RANGE, _ranges_of, lambda ranges: _lists(OPERATING_RANGE, ranges)
)
_DRAIN: Final = Attribute(
    DRAIN,
    lambda item: int_of(item, DRAIN) == 1,
    lambda is_requested: {DRAIN: number(1)} if is_requested else {},
)
_FOR_PAUSE: Final = Attribute(
    DRAIN_REASON,
    lambda item: text_of(item, DRAIN_REASON) == FOR_PAUSE,
    lambda is_pause: {DRAIN_REASON: string(FOR_PAUSE)} if is_pause else {},
)
_STATUS: Final = Attribute(
    STATUS,
    lambda item: None if (text := text_of(item, STATUS)) is None else status_of(text),
    lambda status: {STATUS: string(status_text(status))},
)
_OWN_CPU: Final = Attribute(
    OWN_CPU,
    lambda item: _averages_of(item, OWN_CPU, least=-1.0),
    lambda averages: {OWN_CPU: _numbers(averages)} if averages else {},
)


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """A worker metrics row (protocol §2.2).

    A worker without metrics has empty `stats` and `operating_range`. `drain_requested`, `run_id`,
    `status`, `own_cpu`, `replaces`, `former_run_id` and `former_ended_millis` are our own
    attributes (`kclpDrain` N 1 with `kclpDrainReason` S, `kclpRunId` S, `kclpStatus` S, `kclpCpu` L
    of N, `kclpReplaces` S, `kclpFormerRun` S, `kclpFormerEnded` N), which Java readers ignore.

    Attributes:
        worker_id: Id of the worker.
        last_update_seconds: Time of the last report, in epoch seconds of the writer's clock.
        stats: Up to ten averages of each metric, oldest first; −1 for a failed interval. The keys
            are the short names C, M, NI, NO and T.
        operating_range: `(max utilization percent,)` of each metric.
        support_code: 1 means for a Java leader that this worker can work on the single table
            (protocol §4.5). Our workers publish it there alone, so that no Java leader moves an
            application with three tables while one of them lives.
        drain_requested: Whether the worker is requested to stop.
        drains_for_pause: Whether the reason of the request is that the application is paused.
        run_id: Identifies the process.
        status: Lag, paused shards and failures.
        own_cpu: Up to ten averages of the CPU in percent, on a platform where a Java worker reports
            no metric. In `stats`, a Java leader would compare them with workers without a metric,
            and would not give this worker its share.
        replaces: Id of the worker whose leases the leader moves to this one. None: of no worker.
        former_run_id: The last process that ended because another one started under this worker id.
            None: there was none.
        former_ended_millis: When, in epoch milliseconds of its clock.
    """

    worker_id: str
    last_update_seconds: Annotated[int, a_whole(LAST_UPDATE), REQUIRED]
    stats: Annotated[Mapping[str, tuple[float, ...]], _STATS] = field(default_factory=dict)
    operating_range: Annotated[Mapping[str, tuple[int, ...]], _RANGES] = field(default_factory=dict)
    support_code: Annotated[int | None, a_whole(SUPPORT_CODE)] = None
    drain_requested: Annotated[bool, _DRAIN] = False
    run_id: Annotated[str | None, a_name(RUN_ID, MAX_KEY_BYTES)] = None
    status: Annotated[WorkerStatus | None, _STATUS] = None
    drains_for_pause: Annotated[bool, _FOR_PAUSE] = False
    own_cpu: Annotated[tuple[float, ...], _OWN_CPU] = ()
    replaces: Annotated[str | None, a_name(REPLACES, MAX_KEY_BYTES)] = None
    former_run_id: Annotated[str | None, a_name(FORMER_RUN, MAX_KEY_BYTES)] = None
    former_ended_millis: Annotated[int | None, a_whole(FORMER_ENDED, MAX_MILLIS)] = None

    @property
    def cpu(self) -> tuple[float, ...]:
        """The averages of the CPU, from either attribute."""
        return tuple(self.stats.get(CPU, self.own_cpu))


WORKER_ROW: Final = RowCodec(WorkerMetrics)
_REPORTED: Final = (
    "last_update_seconds",
    "stats",
    "operating_range",
    "support_code",
    "run_id",
    "status",
    "own_cpu",
    "replaces",
)
"""The fields that a report writes. Others write the drain request and the former run."""


def worker_attributes(row: WorkerMetrics) -> Item:
    """Return the attributes that a report writes, without the key.

    `slu` is the time of the same report.
    """
    attributes = {ENTITY_TYPE: string(WORKER_ENTITY)} | WORKER_ROW.write(row, *_REPORTED)
    if row.support_code is not None:
        attributes[SUPPORT_CODE_UPDATE] = attributes[LAST_UPDATE]
    return attributes


def worker_from_item(item: Item, key_name: str) -> WorkerMetrics:
    """Parse a worker metrics row. Missing maps are empty.

    Raises:
        UnreadableRowError: Key or `lut` are missing, or a value is invalid.
    """
    key = printable(text_of(item, key_name) or "without a key")
    with readable(f"the row {key} is not a worker metrics row that can be read"):
        worker_id = required(name_of(item, key_name, MAX_KEY_BYTES), key_name)
        return WORKER_ROW.read(item, worker_id=worker_id)


@dataclass(frozen=True, slots=True)
class WorkerListing:
    """The result of a scan: the workers, in no particular order, and the unreadable rows."""

    workers: tuple[WorkerMetrics, ...]
    bad_rows: tuple[BadRow, ...] = ()


def is_worker(item: Item) -> bool:
    """Return whether the row is a worker metrics row: by `entityType`, missing before KCL 3.5."""
    return text_of(item, ENTITY_TYPE) in (None, WORKER_ENTITY)


def heartbeat_of(item: Item) -> str:
    """Return a digest of the attributes that every report of a worker changes.

    It needs no valid values. A drain request, which others write, does not change it.
    """
    try:
        text = repr((item.get(LAST_UPDATE), item.get(STATS)))
    except RecursionError:  # only from an endpoint that is not DynamoDB
        text = ""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


_OF_ONE_RUN: Final = (DRAIN, DRAIN_REASON, OWN_CPU, REPLACES)


class WorkerMetricsTable:
    """The worker-metrics table of one application, on a row store. All writes are idempotent.

    Args:
        store: The rows.
        support_code: Returns what is published with every report (`sup`). None: nothing.
        verify_layout: Runs before every report. Raises `IncompatibleTableError` if the application
            has another layout now.
    """

    def __init__(
        self,
        store: RowStore,
        support_code: Callable[[], int | None] = lambda: None,
        verify_layout: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._support_code = support_code
        self._verify_layout = verify_layout
        self._decode: Callable[[Item], WorkerMetrics] = partial(
            worker_from_item, key_name=store.key_name
        )

    @property
    def name(self) -> str:
        """Name of the table."""
        return self._store.name

    def ensure_exists(self) -> bool:
        """Create the table if it is missing, wait for it, and return whether it was created."""
        return self._store.ensure_exists()

    def report(self, row: WorkerMetrics, *, takes_over: bool = True) -> WorkerMetrics:
        """Update the row of this worker. Returns the stored row, with a drain request if any.

        A drain request is for the run whose id is in the row. Another run with the same worker id
        removes it, the CPU if it reports that as a metric of KCL, and the worker that the former
        run replaced.

        Args:
            row: The row.
            takes_over: Write the row also if it has another run id: the worker id belongs to the
                process that has started last. A process takes over with its first report.

        Raises:
            WorkerIdTakenError: The row has another run id, and `takes_over` is False.
            IncompatibleTableError: The application has another layout now (protocol §4.3). The
                worker must end: what it writes would be in a table that nobody reads.
        """
        self._verify_layout()
        if row.support_code is None:
            row = replace(row, support_code=self._support_code())
        attributes = worker_attributes(row)
        same_run = [] if row.run_id is None else [AbsentOrEquals(RUN_ID, attributes[RUN_ID])]
        outcome = self._store.update(row.worker_id, same_run, Changes(attributes))
        if not outcome.applied and not takes_over:
            raise self._taken(row.worker_id, text_of(outcome.item or {}, RUN_ID))
        if not outcome.applied:
            of_the_former = tuple(name for name in _OF_ONE_RUN if name not in attributes)
            outcome = self._store.update(row.worker_id, [], Changes(attributes, of_the_former))
        if outcome.item is None:
            return row
        try:
            stored = self._decode(outcome.item)
        except UnreadableRowError:
            # This worker has not written the attributes that make its row unreadable
            foreign = tuple(name for name in OPTIONAL_ATTRIBUTES if name not in attributes)
            self._store.update(row.worker_id, [], Changes(attributes, foreign))
            stored = row
        return stored

    def verify_run(self, worker_id: str, run_id: str) -> None:
        """Read the row of a worker. A row that is missing, or has no run id, belongs to nobody.

        So do the rows of a table that is missing: the table was deleted, or this is a fleet of
        KCL 2.x, which has none.

        Raises:
            WorkerIdTakenError: The row has another run id.
        """
        try:
            other = text_of(self._store.get(worker_id) or {}, RUN_ID)
        except NotFoundError:
            return
        if other not in (None, run_id):
            raise self._taken(worker_id, other)

    def note_former_run(
        self, worker_id: str, run_id: str, other_run_id: str, ended_millis: int
    ) -> bool:
        """Note in the row that a process ends because another one has started under its id.

        The next processes of this id keep the note: a supervisor that restarts each of two
        processes would remove it with every start. Applied again, it has the same effect.

        Args:
            worker_id: The worker id of both.
            run_id: The process that ends.
            other_run_id: The process that has the row.
            ended_millis: The time, epoch milliseconds.

        Returns:
            False: the row is not that of the other process any more.
        """
        # Without the condition, the row of a worker that has stopped since would exist again.
        return self._store.update(
            worker_id,
            [Equals(RUN_ID, string(other_run_id))],
            Changes(WORKER_ROW.attributes(former_run_id=run_id, former_ended_millis=ended_millis)),
        ).applied

    def is_java(self, worker_id: str) -> bool:
        """Return whether a worker has a row without a run id. Each worker of this package has one.

        A process without a row, such as the sensor, is no Java worker.
        """
        item = self._store.get(worker_id)
        return item is not None and is_worker(item) and text_of(item, RUN_ID) is None

    def _taken(self, worker_id: str, other: str | None) -> WorkerIdTakenError:
        return WorkerIdTakenError(
            f"another process has started under the worker id {worker_id!r}: its run is {other}",
            other,
        )

    def scan_workers(self) -> WorkerListing:
        """Return all rows, including those that cannot be read. Eventually consistent.

        The worker of an unreadable row is assigned no leases until its next report, which repairs
        the row.
        """
        key_name = self._store.key_name

        def bad(item: Item, reason: str) -> BadRow:
            return BadRow(self.name, text_of(item, key_name) or "", reason, heartbeat_of(item))

        items = filter(is_worker, self._store.scan())
        return WorkerListing(*read_rows(items, self._decode, bad))

    def request_drain(self, worker_id: str, *, for_pause: bool = False) -> bool:
        """Request a worker to stop. False if it has no row.

        Args:
            worker_id: The worker.
            for_pause: The application is paused; the worker may start again after the pause.
        """
        put = WORKER_ROW.attributes(drain_requested=True, drains_for_pause=for_pause)
        remove = () if for_pause else (DRAIN_REASON,)
        return self._store.update(
            worker_id, [Present(self._store.key_name)], Changes(put, remove)
        ).applied

    def delete(self, row: WorkerMetrics) -> bool:
        """Delete the row if its `lut` equals that of `row`. True: there is no row now.

        Applied if there is no row.
        """
        outcome = self._store.delete(
            row.worker_id, [Equals(LAST_UPDATE, number(row.last_update_seconds))]
        )
        return outcome.applied or outcome.item is None

    def deregister(self, worker_id: str, run_id: str | None = None) -> None:
        """Delete the row of a worker that stops, unless it has another run id.

        Args:
            worker_id: The worker.
            run_id: Its run id. None: the row is deleted in any case.
        """
        run = [] if run_id is None else [AbsentOrEquals(RUN_ID, string(run_id))]
        self._store.delete(worker_id, run)
