"""Count lost records in the coordinator-state table, until a person acknowledges them.

They are `RecordsLost` and `TableRestored`.
"""

import threading
from collections.abc import Callable
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.events import (
    AwsTrouble,
    Event,
    EventSink,
    RecordsLost,
    TableRestored,
    WorkerStopped,
)
from kcl_pipeline.leases.application import Loss, Losses
from kcl_pipeline.leases.coordinator import CoordinatorStateTable
from kcl_pipeline.threads import Joinable, Spawn

RETRY_SECONDS: Final = 30.0


def _spawn(name: str, target: Callable[[], None]) -> Joinable:
    # Not a daemon: a process that ends waits for the write, which lasts a few calls.
    thread = threading.Thread(target=target, name=name, daemon=False)
    thread.start()
    return thread


def recording_losses(events: EventSink, table: CoordinatorStateTable, clock: Clock) -> EventSink:
    """Return a sink that records losses and passes all events on to `events`.

    A sink that records already is returned as it is.
    """
    return events if isinstance(events, LossRecorder) else LossRecorder(events, table, clock)


class LossRecorder:
    """An event sink that records losses, and passes all events on.

    A loss starts a thread, which writes all losses that wait and ends. The caller does not wait for
    the table. A write that fails emits `AwsTrouble`. It is repeated at the next loss, at the next
    other event after `RETRY_SECONDS`, and when the worker stops.

    Args:
        events: Receives all events.
        table: The coordinator-state table.
        clock: The clock.
        spawn: Starts a thread.
    """

    def __init__(
        self, events: EventSink, table: CoordinatorStateTable, clock: Clock, spawn: Spawn = _spawn
    ) -> None:
        self._events = events
        self._table = table
        self._clock = clock
        self._spawn = spawn
        self._lock = threading.Lock()
        self._pending: dict[object, Loss] = {}
        self._writing = False
        self._retry_at = 0.0
        # Only the writing thread uses these.
        self._batch: tuple[Loss, ...] = ()
        self._result: Losses | None = None

    def __call__(self, event: Event) -> None:
        """Record the event if it is a loss, and pass it on."""
        if isinstance(event, RecordsLost | TableRestored):
            loss = Loss.of(event, int(self._clock.wall() * 1000))
            with self._lock:
                known = self._pending.get(loss.identity)
                if known is None or known.end != loss.end:
                    self._pending[loss.identity] = loss
            self._start()
        elif self._pending and (
            isinstance(event, WorkerStopped) or self._clock.monotonic() >= self._retry_at
        ):
            self._start()
        self._events(event)

    def _start(self) -> None:
        with self._lock:
            if self._writing:
                return
            self._writing = True
        try:
            self._spawn("records-lost", self._write)
        except RuntimeError as error:  # the process is ending, or has too many threads
            self._failed(error)

    def _write(self) -> None:
        while True:
            with self._lock:
                # A batch whose write failed is written again as it was: see `_count`.
                self._batch = self._batch or tuple(self._pending.values())
                if not self._batch:
                    self._writing = False
                    return
            try:
                self._table.change_losses(self._count)
            except Exception as error:  # noqa: BLE001 (the worker reads on; the error is reported)
                self._failed(error)
                return
            with self._lock:
                for loss in self._batch:
                    if self._pending.get(loss.identity) is loss:
                        del self._pending[loss.identity]
            self._batch, self._result = (), None

    def _count(self, record: Losses) -> Losses:
        # Equal: the former write of this batch was applied, and its answer lost.
        if record != self._result:
            self._result = record.with_losses(self._batch)
        return self._result

    def _failed(self, error: Exception) -> None:
        with self._lock:
            self._writing = False
            self._retry_at = self._clock.monotonic() + RETRY_SECONDS
        self._events(AwsTrouble("recording lost records", str(error)))
