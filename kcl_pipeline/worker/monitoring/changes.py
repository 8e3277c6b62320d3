"""Which events of a worker change leases in a way that the leader must see soon.

A leader does not scan the lease table in every cycle. It reads the worker metrics rows, in which a
worker announces such changes (`WorkerMetrics.changes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kcl_pipeline.events import (
    Event,
    EventSink,
    LeaseReleased,
    LeasesCreated,
    RecordsLost,
    ShardEnded,
)

CHANGES: Final = (LeaseReleased, ShardEnded, LeasesCreated, RecordsLost)
"""After each of them, a lease may have no owner. `RecordsLost`: children of a shard that its stream
does not list any more were created.
"""


def noting_changes(events: EventSink, note: Callable[[], None]) -> EventSink:
    """Return an event sink that also calls `note` after each event of `CHANGES`."""

    def take(event: Event) -> None:
        if isinstance(event, CHANGES):
            note()
        events(event)

    return take
