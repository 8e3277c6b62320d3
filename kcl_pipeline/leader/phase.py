"""What the phases of a leader cycle share: the rows as they are now, the deadline, the fence, and the streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import NotACompatibleTable
from kcl_pipeline.leader.lock import LeaderElection
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.leases.tables import LeaseTable, WorkerMetrics, WorkerMetricsTable
from kcl_pipeline.planning.model import Plan, PlanInput
from kcl_pipeline.records.kinesis import KinesisClient
from kcl_pipeline.shards import StreamId

WRITES_AT_ONCE = 64
"""How many writes there are between two looks at the lock and the deadline."""

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""`map`, or one that calls in parallel and gives the results in order, such as `ThreadPoolExecutor.map`."""


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
class Round:
    """One cycle under way. `leases` is kept as the rows are after this cycle's own writes; `errors` are the sentences for the report."""

    leases: dict[str, Lease]
    unreadable: tuple[str, ...]
    workers: tuple[WorkerMetrics, ...]
    asked: float
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
    """One look at both tables. `asked` and `answered` are monotonic seconds."""

    leases: tuple[Lease, ...]
    unreadable: tuple[str, ...]
    workers: tuple[WorkerMetrics, ...]
    asked: float
    answered: float


def scan(lease_table: LeaseTable, worker_table: WorkerMetricsTable, clock: Clock, *, is_multi_stream: bool) -> Scan:
    """Read both tables. Raises `NotACompatibleTable` when the leases are of the other form, single-stream or multi-stream (protocol §1.3)."""
    asked = clock.monotonic()
    listing = lease_table.list_leases()
    workers = worker_table.list_workers()
    found = Scan(listing.leases, listing.unreadable, workers, asked, clock.monotonic())
    for lease in found.leases:
        if (lease.stream is None) == is_multi_stream:
            form = "no stream in its key: it is of a single-stream application" if lease.stream is None else f"the stream {lease.stream} in its key"
            wanted = "several streams" if is_multi_stream else "one stream"
            raise NotACompatibleTable(
                f"the lease {lease.lease_key} of the table {lease_table.name} has {form}, but the setting streams names {wanted}; "
                "write another application_name"
            )
    return found


def leases_of(leases: Iterable[Lease], stream: StreamId) -> list[Lease]:
    """The leases that belong to the stream."""
    wanted = stream.serialized if stream.creation_epoch is not None else None
    return [lease for lease in leases if lease.stream == wanted]


def keys_of(keys: Iterable[str], stream: StreamId) -> list[str]:
    """Those lease keys that belong to the stream; for rows of which only the key could be read."""
    if stream.creation_epoch is None:
        return list(keys)
    return [key for key in keys if key.startswith(f"{stream.serialized}:")]


class Streams:
    """The configured streams, resolved once each."""

    def __init__(self, settings: ConsumerSettings, kinesis: KinesisClient) -> None:
        self._settings = settings
        self._kinesis = kinesis
        self._known: dict[str, StreamId] = {}

    def resolve(self, name_or_arn: str) -> StreamId:
        """The identifier, from the service the first time. Raises `NotFound` and the other errors of Kinesis."""
        if name_or_arn not in self._known:
            self._known[name_or_arn] = self._kinesis.resolve_stream(name_or_arn, multi_stream=self._settings.is_multi_stream)
        return self._known[name_or_arn]

    def known(self) -> tuple[StreamId, ...]:
        """The streams resolved so far, in the order of the settings."""
        return tuple(self._known[name] for name in self._settings.streams if name in self._known)

    def for_each(self, work: Callable[[StreamId], None], errors: list[Exception]) -> None:
        """Do something for every stream; an error of one is added to `errors` and does not keep the others waiting."""
        for name in self._settings.streams:
            try:
                work(self.resolve(name))
            except NotLeadingError:
                raise
            except Exception as error:  # noqa: BLE001 (the cycle counts and reports it)
                errors.append(error)


class Fence:
    """The look at the lock that stands before every group of writes."""

    def __init__(self, election: LeaderElection) -> None:
        self._election = election

    def check(self) -> None:
        """Raises `NotLeadingError` unless the lock's heartbeat succeeds now."""
        if not self._election.confirm():
            raise NotLeadingError
