"""Note what the processing thread does, so that another thread can see that it hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pyarrow as pa

from kcl_pipeline.batch import Batch, BatchWriter, TxnVersions, Written
from kcl_pipeline.clock import Clock
from kcl_pipeline.events import HangStep
from kcl_pipeline.leases.stored_shards import StoredShards
from kcl_pipeline.position import Position
from kcl_pipeline.worker.commit.protocol import CommitProtocol, CommitResult
from kcl_pipeline.worker.consumer import ShardConsumer


@dataclass(frozen=True, slots=True)
class Doing:
    """A step of the processing thread.

    Attributes:
        step: None: the thread is between two steps.
        since: When the step began (monotonic seconds).
        thread: Identifier of the thread.
    """

    step: HangStep | None
    since: float
    thread: int


class Activity:
    """The step of the processing thread.

    The processing thread calls `enter` and `rest`. Any thread may read `now`, which is replaced as
    a whole.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.now = Doing(None, clock.monotonic(), threading.get_ident())

    def enter(self, step: HangStep) -> None:
        """Begin a step. This is progress, also when the last step was the same."""
        self.now = Doing(step, self._clock.monotonic(), threading.get_ident())

    def rest(self) -> None:
        """End the step."""
        self.now = Doing(None, self._clock.monotonic(), threading.get_ident())


class WatchedWriter:
    """`BatchWriter` that notes each call of another one.

    What follows a `write`, until the next step, counts as COMMITTING: dead letters are written.
    """

    def __init__(self, writer: BatchWriter, activity: Activity) -> None:
        self._writer = writer
        self._activity = activity

    def write(self, batch: Batch) -> Written:  # noqa: D102 (documented by the protocol)
        self._activity.enter(HangStep.WRITING)
        written = self._writer.write(batch)
        self._activity.enter(HangStep.COMMITTING)
        return written

    def probe(self, parts: Sequence[pa.Table]) -> Sequence[str | None]:  # noqa: D102
        self._activity.enter(HangStep.WRITING)
        return self._writer.probe(parts)


class WatchedCommit:
    """`CommitProtocol` that notes the prepares and commits of another one."""

    def __init__(self, protocol: CommitProtocol, activity: Activity) -> None:
        self._protocol = protocol
        self._activity = activity

    def use(self, protocol: CommitProtocol) -> None:
        """Replace the other one, before the first call."""
        self._protocol = protocol

    @property
    def stored(self) -> StoredShards | None:  # noqa: D102 (documented by the protocol)
        return self._protocol.stored

    def look_up(  # noqa: D102 (documented by the protocol, as are the others)
        self, consumers: Iterable[ShardConsumer]
    ) -> dict[str, TxnVersions]:
        return self._protocol.look_up(consumers)

    def resolve(  # noqa: D102
        self, consumer: ShardConsumer, seen: TxnVersions | None = None
    ) -> Position:
        return self._protocol.resolve(consumer, seen)

    def preparing(  # noqa: D102
        self, batch: Batch, consumers: dict[str, ShardConsumer]
    ) -> AbstractContextManager[None]:
        return self._protocol.preparing(batch, consumers)

    def prepare(  # noqa: D102
        self, batch: Batch, consumers: dict[str, ShardConsumer], written: Written
    ) -> dict[str, str]:
        self._activity.enter(HangStep.PREPARING)
        return dict(self._protocol.prepare(batch, consumers, written))

    def commit(  # noqa: D102
        self, batch: Batch, consumers: dict[str, ShardConsumer], written: Written
    ) -> CommitResult:
        self._activity.enter(HangStep.COMMITTING)
        return self._protocol.commit(batch, consumers, written)

    def checkpoint(self, consumer: ShardConsumer) -> None:  # noqa: D102
        self._protocol.checkpoint(consumer)

    def flush_due(  # noqa: D102
        self, consumer: ShardConsumer, now: float, *, idle: bool
    ) -> bool:
        return self._protocol.flush_due(consumer, now, idle=idle)

    def begin(  # noqa: D102
        self, consumer: ShardConsumer, ended_parents: Iterable[str], seen: TxnVersions | None
    ) -> None:
        self._protocol.begin(consumer, ended_parents, seen)

    def end(self, consumer: ShardConsumer) -> None:  # noqa: D102
        self._protocol.end(consumer)
