"""Convert events to values of the instruments.

All functions are pure. A value has the dimensions of its instrument; settings may remove some of
them later.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from kcl_pipeline import events as ev
from kcl_pipeline.events import Event
from kcl_pipeline.metrics.instruments.catalogue import INSTRUMENTS
from kcl_pipeline.metrics.instruments.catalogue.leases import CURRENT_LEASES
from kcl_pipeline.metrics.instruments.instrument import (
    CALL,
    FORCED,
    REASON,
    SHARD,
    STEP,
    STREAM,
    WORKER,
    Attributes,
    Instrument,
    Measure,
    MetricValue,
)

_TEXTS: Final[dict[str, Callable[[Any], str]]] = {
    WORKER: lambda e: e.from_worker if isinstance(e, ev.HandoffCompleted) else e.worker_id,
    STREAM: lambda e: e.stream,
    REASON: lambda e: str(e.reason),
    STEP: lambda e: str(e.step),
    FORCED: lambda e: str(e.forced).lower(),
    CALL: lambda e: e.operation.partition(" ")[0],
}
"""The values of the dimensions of an event, except those of its leases."""


def _by_event() -> Mapping[type[Event], list[tuple[Instrument, Measure]]]:
    found: defaultdict[type[Event], list[tuple[Instrument, Measure]]] = defaultdict(list)
    for instrument in INSTRUMENTS:
        for event, measure in instrument.events.items():
            found[event].append((instrument, measure))
    return found


_FED: Final = _by_event()


def observations(event: Event) -> tuple[MetricValue, ...]:
    """The values of one event; empty for an event without metrics."""
    fed = _FED.get(type(event), ())
    return tuple(one for instrument, measure in fed for one in _values(instrument, measure, event))


def _values(instrument: Instrument, measure: Measure, event: Any) -> Iterator[MetricValue]:
    value = measure(event)
    if value is None:
        return
    of_lease = SHARD in instrument.dimensions
    others = tuple(
        (name, _TEXTS[name](event))
        for name in instrument.dimensions
        if not (of_lease and name in (SHARD, STREAM))
    )
    if isinstance(value, Mapping):
        by_lease = value
    elif of_lease:
        keys = getattr(event, "lease_keys", None) or (event.lease_key,)
        by_lease = dict.fromkeys(keys, value)
    else:
        yield instrument.of(value, others)
        return
    for key, one in by_lease.items():
        yield instrument.of(one, (*dimensions_of(key), *others))


@lru_cache(maxsize=4096)
def dimensions_of(lease_key: str) -> Attributes:
    """The dimensions of a lease. Only keys of several streams name their stream, as in KCL."""
    stream, _, shard = lease_key.rpartition(":")
    return ((SHARD, shard), (STREAM, stream)) if stream else ((SHARD, shard),)


class HeldLeaseCount:
    """Count the leases that each worker of this process holds, from its events."""

    def __init__(self) -> None:
        self._held: dict[str, set[str]] = {}

    def after(self, event: Event) -> tuple[MetricValue, ...]:
        """The new count after an event that changes it; otherwise empty."""
        match event:
            case ev.WorkerStarted(worker_id=worker):
                self._held.setdefault(worker, set())
            case ev.LeaseGained(worker_id=worker, lease_key=key):
                self._held.setdefault(worker, set()).add(key)
            case (
                ev.LeaseLost(worker_id=worker, lease_key=key)
                | ev.LeaseReleased(worker_id=worker, lease_key=key)
                | ev.HandoffCompleted(from_worker=worker, lease_key=key)
            ):
                self._held.setdefault(worker, set()).discard(key)
            case ev.WorkerStopped(worker_id=worker):
                self._held[worker] = set()
            case _:
                return ()
        return (CURRENT_LEASES.of(len(self._held[worker]), ((WORKER, worker),)),)
