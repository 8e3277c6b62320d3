"""What the phases of a leader cycle share: the rows as they are now, the deadline, the fence, and
the streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import (
    AccessDeniedError,
    InvalidRequestError,
    NotFoundError,
    ShardSyncError,
    StreamReplacedError,
    UnreadableRowError,
)
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.kinesis.witness import require_same_stream
from kcl_pipeline.leader.lock import LeaderElection
from kcl_pipeline.leases.lease import BadRow, Lease
from kcl_pipeline.leases.tables import LeaseTable, WorkerMetrics, WorkerMetricsTable
from kcl_pipeline.planning.model import Plan, PlanInput
from kcl_pipeline.shards import StreamId

WRITES_AT_ONCE = 64
"""How many writes there are between two looks at the lock and the deadline."""

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""`map`, or one that calls in parallel and gives the results in order, such as
`ThreadPoolExecutor.map`.
"""


class NotLeadingError(Exception):
    """The lock turned out to be somebody else's: nothing more may be written in this cycle."""


class Deadline:
    """A point on the clock after which nothing new is begun; none with `seconds` None."""

    def __init__(self, clock: Clock, seconds: float | None) -> None:
        self._clock = clock
        self._end = None if seconds is None else clock.monotonic() + seconds

    def passed(self) -> bool:
        """Whether it is over."""
        return self._end is not None and self._clock.monotonic() >= self._end


@dataclass(slots=True)
class CycleContext:
    """One cycle under way. `leases` is kept as the rows are after this cycle's own writes; `errors`
    are the sentences for the report.
    """

    leases: dict[str, Lease]
    bad_rows: tuple[BadRow, ...]
    unreadable: frozenset[str]
    workers: tuple[WorkerMetrics, ...]
    scan_started: float
    deadline: Deadline
    created: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    expired: tuple[str, ...] = ()
    plan: Plan | None = None
    plan_input: PlanInput | None = None
    failed_moves: int = 0
    errors: list[Exception] = field(default_factory=list)

    def of_stream(self, stream: StreamId) -> list[Lease]:
        """The leases of one stream."""
        return leases_of(self.leases.values(), stream)


@dataclass(frozen=True, slots=True)
class Scan:
    """One look at both tables. `unreadable` are the keys of lease rows that cannot be used,
    `bad_rows` those of both tables; `asked` and `answered` are monotonic seconds.
    """

    leases: tuple[Lease, ...]
    unreadable: frozenset[str]
    bad_rows: tuple[BadRow, ...]
    workers: tuple[WorkerMetrics, ...]
    scan_started: float
    scan_finished: float


def scan(
    lease_table: LeaseTable,
    worker_table: WorkerMetricsTable,
    clock: Clock,
    *,
    is_multi_stream: bool,
) -> Scan:
    """Read both tables. A lease of the other form, single-stream or multi-stream, is a bad row."""
    scan_started = clock.monotonic()
    listing = lease_table.list_leases().of_form(lease_table.name, multi_stream=is_multi_stream)
    workers = worker_table.scan_workers()
    return Scan(
        leases=listing.leases,
        unreadable=frozenset(listing.unreadable),
        bad_rows=(*listing.bad_rows, *workers.bad_rows),
        workers=workers.workers,
        scan_started=scan_started,
        scan_finished=clock.monotonic(),
    )


def leases_of(leases: Iterable[Lease], stream: StreamId) -> list[Lease]:
    """The leases that belong to the stream."""
    wanted = stream.serialized if stream.creation_epoch is not None else None
    return [lease for lease in leases if lease.stream == wanted]


def keys_of(keys: Iterable[str], stream: StreamId) -> list[str]:
    """Those lease keys that belong to the stream; for rows of which only the key could be read."""
    if stream.creation_epoch is None:
        return [key for key in keys if ":" not in key]
    return [key for key in keys if key.startswith(f"{stream.serialized}:")]


class Streams:
    """The configured streams, resolved once each."""

    def __init__(self, settings: ConsumerSettings, kinesis: KinesisClient) -> None:
        self._settings = settings
        self._kinesis = kinesis
        self._known: dict[str, StreamId] = {}

    def resolve(self, name_or_arn: str) -> StreamId:
        """The identifier, from the service the first time.

        Raises `NotFoundError` and the other errors of Kinesis.
        """
        if name_or_arn not in self._known:
            self._known[name_or_arn] = self._kinesis.resolve_stream(
                name_or_arn, multi_stream=self._settings.is_multi_stream
            )
        return self._known[name_or_arn]

    def confirm(self, stream: StreamId) -> None:
        """Ask whether the stream still is the one that was resolved.

        To be called after a listing, before anything is written because of it. Raises
        `StreamReplacedError`, `NotFoundError` and the other errors of Kinesis.
        """
        require_same_stream(self._kinesis, stream)

    def forget(self) -> None:
        """Resolve all streams anew when they are next asked for."""
        self._known.clear()

    def known(self) -> tuple[StreamId, ...]:
        """The streams resolved so far, in the order of the settings."""
        return tuple(self._known[name] for name in self._settings.streams if name in self._known)

    def for_each(self, work: Callable[[StreamId], None], errors: list[Exception]) -> None:
        """Do something for every stream; an error of one is added to `errors` and does not keep the
        others waiting.
        """
        for name in self._settings.streams:
            try:
                work(self.resolve(name))
            except NotLeadingError:
                raise
            except Exception as error:  # noqa: BLE001 (the cycle counts and reports it)
                errors.append(error)


def is_local(error: Exception) -> bool:
    """Whether an error is about one row or one stream, so that another leader could do no better.

    Those about this process (its network, its permissions for the tables, a defect) are not.
    """
    if isinstance(error, AccessDeniedError):
        return error.operation in _STREAM_OPERATIONS
    return isinstance(error, _LOCAL_ERRORS)


_STREAM_OPERATIONS: Final = frozenset({"DescribeStreamSummary", "ListShards"})
_LOCAL_ERRORS: Final = (
    InvalidRequestError,
    NotFoundError,
    StreamReplacedError,
    ShardSyncError,
    UnreadableRowError,
    ValueError,
)


class LeadershipCheck:
    """The look at the lock that stands before every group of writes, and the time for which it is
    good: a write that hangs may take longer than another candidate waits.
    """

    def __init__(self, election: LeaderElection) -> None:
        self._election = election

    @property
    def term(self) -> int:
        """Counts how often this process has got the lock: what it knew of before is out of date."""
        return self._election.term

    def check(self) -> None:
        """Raises `NotLeadingError` unless the lock's heartbeat succeeds now."""
        if not self._election.confirm():
            raise NotLeadingError

    def is_current(self) -> bool:
        """Whether nobody else can have got the lock since it was last looked at."""
        return not self._election.may_have_expired()

    def keep(self, number: int) -> None:
        """Check before write number `number` of many that are made one after the other, if it is
        the first of a group, or if the last check is not good any more.
        """
        if number % WRITES_AT_ONCE == 0 or not self.is_current():
            self.check()
