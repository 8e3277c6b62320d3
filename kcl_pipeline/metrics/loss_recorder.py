"""Record lost records in the coordinator-state table, until a person acknowledges them.

They are `RecordsLost` and `TableRestored`.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from kcl_pipeline.background import Joinable, Spawn
from kcl_pipeline.clock import Clock
from kcl_pipeline.events import (
    AwsTrouble,
    Event,
    EventSink,
    RecordsLost,
    TableRestored,
    WorkerStopped,
)
from kcl_pipeline.leases.application.losses import Loss, LossLog
from kcl_pipeline.leases.tables import CoordinatorStateTable

RETRY_SECONDS: Final = 30.0
MAX_PENDING: Final = 500
"""Largest number of losses that wait for the table. A further one replaces the oldest."""

_log = logging.getLogger(__name__)


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

    def __call__(self, event: Event) -> None:
        """Record the event if it is a loss, and pass it on."""
        if self._pending or isinstance(event, RecordsLost | TableRestored):
            self._note(event)
        self._events(event)

    def _note(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, RecordsLost | TableRestored):
                loss = Loss.of(event, int(self._clock.wall() * 1000))
                self._pending[loss.extent] = loss
                if len(self._pending) > MAX_PENDING:
                    del self._pending[next(iter(self._pending))]
            elif not isinstance(event, WorkerStopped) and self._clock.monotonic() < self._retry_at:
                return
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
                taken = dict(self._pending)
                if not taken:
                    self._writing = False
                    return
            try:
                losses = tuple(taken.values())
                self._table.change_losses(partial(LossLog.with_losses, losses=losses))
            except Exception as error:  # noqa: BLE001 (the worker reads on; the error is reported)
                self._failed(error)
                return
            with self._lock:
                for extent, loss in taken.items():
                    if self._pending.get(extent) is loss:
                        del self._pending[extent]

    def _failed(self, error: Exception) -> None:
        with self._lock:
            self._writing = False
            self._retry_at = self._clock.monotonic() + RETRY_SECONDS
        try:
            self._events(AwsTrouble("recording lost records", str(error)))
        except Exception:  # noqa: BLE001 (likewise)
            _log.exception("cannot report that lost records were not recorded")
