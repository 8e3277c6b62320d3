"""Interleavings of the exactly-once commit: the production `ProgressStore` on `HeldLeases`.

The actors are a few workers, and a leader that moves leases; they share a sink. At each I/O call
another actor can continue, or the process can crash. Invariants after every step: committed ranges
are contiguous, none is repeated, and no checkpoint is ahead of the table. After every schedule a
new worker reads all shards to their end.

`verification.interleavings.scenarios` has the scenarios. Those in which lease rows are created and
deleted run in `verification.interleavings.lineage`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kcl_pipeline.batch import NO_RECORDS, Batch, Chunk
from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.errors import (
    LeaseLostError,
    OtherTableError,
    SinkError,
    ThrottledError,
    UnavailableError,
    UnreadableRowError,
)
from kcl_pipeline.events import Event, EventSink, ignore_events
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.store import Item
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.shards import StreamId
from kcl_pipeline.sinks.sink import Sink
from kcl_pipeline.testing.sink import FaultHook, MemoryTable, SinkFault
from kcl_pipeline.testing.tables import InMemoryLeaseTable, create_lease
from kcl_pipeline.worker.batch_runner import LandStep
from kcl_pipeline.worker.commit import ProgressStore
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.watchdog import Activity
from verification.interleavings.explorer import Actor, Turns
from verification.interleavings.ranges import SCHEMA, RangeWriter, contiguous, number_of, range_of
from verification.interleavings.stepping import StepClock, SteppedSink, stepped_view

STREAM: Final = StreamId("orders")
_RESTARTS: Final = 5


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that holds the leases of `worker_id` and cuts batches of `size` records.

    `renews` adds a thread that renews the leases. `sink_faults` happen at the n-th call (from 1) of
    a kind. `lost_answers` are faults of the n-th UpdateItem: the response is lost `before` or
    `after` the write is applied, or the call is `throttled`.
    """

    name: str
    size: int = 1
    worker_id: str = ""
    renews: int = 0
    sink_faults: Mapping[tuple[str, int], SinkFault] = field(default_factory=dict)
    lost_answers: Mapping[int, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The worker id of its leases: its name, unless it shares the id of another process."""
        return self.worker_id or self.name


@dataclass(frozen=True, slots=True)
class Scenario:
    """Workers, leases, moves and records of one scenario.

    The first worker holds all leases at the start. Moves are pairs of lease key and worker id, in
    order.
    """

    name: str
    workers: tuple[Worker, ...]
    moves: tuple[tuple[str, str], ...] = ()
    leases: tuple[str, ...] = ("s0",)
    records: int = 2
    preemptions: int = 2


class Bench:
    """One run of a scenario, as a `World` of the explorer.

    Subclasses override `sink_for` and `ranges` to use another sink.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.turns = Turns()
        self.events: list[Event] = []
        self.clock = StepClock(self.turns)
        self.table = InMemoryLeaseTable("app", clock=StepClock(Turns()))
        self.log = MemoryTable()
        self.writer = self.new_writer()
        self.moved = 0
        self._seen: tuple[int, ...] = ()
        self._kept: tuple[Item, ...] = ()
        for key in scenario.leases:
            create_lease(self.table, Lease(key, TRIM_HORIZON))
            self._move(key, scenario.workers[0].id)
        self.actors: list[Actor] = []
        for worker in scenario.workers:
            self._add_worker(worker)
        for number, (key, owner) in enumerate(scenario.moves):
            self.actors.append(
                Actor(
                    f"move {key} to {owner}",
                    self._mover(number, key, owner),
                    enabled=self._is_next(number),
                )
            )
        if any(SinkFault.LAND_LATE in w.sink_faults.values() for w in scenario.workers):
            self.actors.append(Actor("late", self._land_late, enabled=self.late_waits))

    def _land_late(self) -> None:
        self.log.land_late()

    def late_waits(self) -> bool:
        """Whether a delayed entry exists that can be committed at any time."""
        return bool(self.log._waiting)  # noqa: SLF001 (its own test kit)

    def new_writer(self) -> RangeWriter:
        """Create the writer of all processes."""
        return RangeWriter()

    def sink_for(self, faults: FaultHook) -> Sink:
        """Create a sink for one process."""
        return SteppedSink(self.log, self.turns, faults)

    # -- actors
    # ----------------------------------------------------------------------------

    def _add_worker(self, worker: Worker) -> None:
        leases = HeldLeases(
            stepped_view(self.table, self.turns, worker.lost_answers),
            worker.id,
            LeaseSettings(),
            self.clock,
            self.events.append,
        )
        process = Process(
            worker.id,
            leases,
            self.sink_for(_faults(worker)),
            self.writer,
            self.clock,
            self.events.append,
            worker.size,
            self.scenario.records,
        )

        def owns() -> bool:
            return any(lease.owner == worker.id for lease in self.rows())

        self.actors.append(Actor(worker.name, process.run, enabled=owns))
        if worker.renews:
            renewing = Actor(
                f"{worker.name} renews",
                lambda: _renew(leases, worker.renews),
                enabled=lambda: bool(leases.held()),
            )
            self.actors.append(renewing)

    def _is_next(self, number: int) -> Callable[[], bool]:
        return lambda: self.moved == number

    def _mover(self, number: int, key: str, owner: str) -> Callable[[], None]:
        def move() -> None:
            self._move(key, owner)
            self.moved = number + 1

        return move

    def _move(self, key: str, owner: str) -> None:
        row = self.table.get(key)
        if row is None or self.table.assign(row, owner) is None:
            raise AssertionError(f"the leader could not assign {key}")

    # -- checks
    # ----------------------------------------------------------------------------

    def rows(self) -> list[Lease]:
        """The current lease rows."""
        # No copy, and each row decoded once: at every step they would take most of the run time.
        items, decode = self.table.store._rows.values(), self.table._decode  # noqa: SLF001
        return [decode(item) for item in items]

    def ranges(self) -> Sequence[tuple[str, int, int]]:
        """All committed ranges, in order: lease key, after (exclusive), through (inclusive)."""
        return [range_of(file.path) for file in self.log.files]

    def check(self) -> None:
        """See `World.check`."""
        items = tuple(self.table.store._rows.values())  # noqa: SLF001 (as in `rows`)
        seen = (len(self.log.log), *map(id, items))
        if seen == self._seen:
            return
        self._seen, self._kept = seen, items
        reached = contiguous(self.ranges())
        for lease in self.rows():
            if number_of(lease.checkpoint) > reached.get(lease.lease_key, 0):
                raise AssertionError(
                    f"the checkpoint of {lease.lease_key} is at {lease.checkpoint}, and the "
                    f"table at {reached.get(lease.lease_key, 0)}"
                )

    def finish(self) -> None:
        """See `World.finish`.

        Checks that no worker ended with an unexpected error. Then a new worker gets every lease,
        and delayed entries are committed.
        """
        for actor in self.actors:
            if actor.error is not None:
                raise AssertionError(
                    f"{actor.name} ended with {type(actor.error).__name__}: {actor.error}"
                ) from actor.error
        self.run_fresh()
        reached = contiguous(self.ranges())
        for lease in self.rows():
            if (
                reached.get(lease.lease_key) != self.scenario.records
                or number_of(lease.checkpoint) != self.scenario.records
            ):
                raise AssertionError(
                    f"{lease.lease_key} stands still at {reached.get(lease.lease_key)}, its "
                    f"checkpoint at {lease.checkpoint}"
                )

    def run_fresh(self) -> Process:
        """Let a new worker read all shards to their end; then delayed entries are committed."""
        for key in self.scenario.leases:
            self._move(key, "fresh")
        leases = HeldLeases(self.table.view(), "fresh", LeaseSettings(), self.clock, ignore_events)
        process = Process(
            "fresh",
            leases,
            self.sink_for(lambda *_: None),
            self.writer,
            self.clock,
            ignore_events,
            1,
            self.scenario.records,
        )
        process.run()
        self.log.land_late()
        return process


class Process:
    """The commits of one worker: start, commit batch after batch, flush.

    After a `SinkError` or a refusal it starts the shard again, as the worker does.

    Attributes:
        stopped: The leases that stand still because the table is not the one of their row.
    """

    def __init__(
        self,
        worker_id: str,
        leases: HeldLeases,
        sink: Sink,
        writer: RangeWriter,
        clock: StepClock,
        events: EventSink,
        size: int,
        records: int,
    ) -> None:
        self._leases = leases
        self._commit = ProgressStore(
            leases, sink, lambda _: (), clock, events, rng=random.Random(worker_id)
        )
        self._steps = LandStep(
            self._commit, writer.write, clock, events, worker_id, Activity(clock)
        )
        sink.ensure(SCHEMA)
        self._size = size
        self._records = records
        self._worker_id = worker_id
        self.stopped: set[str] = set()

    def run(self) -> None:
        """Run once; end when everything is committed or lost."""
        consumers = {
            held.lease_key: ShardConsumer(held, STREAM) for held in self._leases.discover()
        }
        for _ in range(_RESTARTS):
            self._start(consumers, consumers)
            try:
                while consumers and (batch := self._cut(consumers)).ranges:
                    chosen = {part.lease_key: consumers[part.lease_key] for part in batch.ranges}
                    self._steps.run(batch, chosen)
                    keys = [one.lease_key for one in batch.ranges if one.lease_key not in chosen]
                    for key in keys:
                        consumers[key].is_refused = True
                    self._start(consumers, keys)
            except SinkError:
                continue
            break
        for consumer in consumers.values():
            self._retrying(consumer, partial(self._commit.checkpoint, consumer))

    def _start(self, consumers: dict[str, ShardConsumer], keys: Iterable[str]) -> None:
        for key in list(keys):
            if not self._retrying(consumers[key], partial(self._start_one, consumers[key])):
                del consumers[key]

    def _start_one(self, consumer: ShardConsumer) -> None:
        seen = self._commit.look_up([consumer])
        (outcome,) = self._commit.start([consumer], seen).values()
        if isinstance(outcome, Exception):
            raise outcome

    def _retrying(self, consumer: ShardConsumer, call: Callable[[], object]) -> bool:
        for _ in range(_RESTARTS):
            try:
                call()
            except LeaseLostError as error:
                self._leases.drop(consumer.held, str(error))
                return False
            except UnreadableRowError as error:
                self._leases.drop(consumer.held, str(error))
                return False
            except OtherTableError:
                self.stopped.add(consumer.lease_key)
                return False
            except (ThrottledError, UnavailableError, SinkError):
                continue
            return True
        return False

    def _cut(self, consumers: Mapping[str, ShardConsumer]) -> Batch:
        ranges = []
        for key, consumer in sorted(consumers.items()):
            at = number_of(consumer.committed or TRIM_HORIZON)
            through = min(at + self._size, self._records)
            if through > at:
                ranges.append(
                    Chunk(
                        key,
                        NO_RECORDS,
                        consumer.committed or TRIM_HORIZON,
                        Position(str(through)),
                        0,
                    )
                )
        return Batch(self._worker_id, tuple(ranges), NO_RECORDS)


def _renew(leases: HeldLeases, times: int) -> None:
    for _ in range(times):
        leases.renew_all()


def _faults(worker: Worker) -> FaultHook:
    calls: dict[str, int] = {}

    def hook(operation: str, _keys: tuple[str, ...]) -> SinkFault | None:
        calls[operation] = calls.get(operation, 0) + 1
        return worker.sink_faults.get((operation, calls[operation]))

    return hook
