"""Simulated I/O calls: each takes time before and after its effect, and can fail as in AWS."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final

from kcl_pipeline.errors import (
    AccessDeniedError,
    ExpiredIteratorError,
    NotFoundError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.testing.row_store import LandsLate
from kcl_pipeline.testing.sink import SinkFault
from verification.simulation.environment.scheduler import Host


class Fault(StrEnum):
    """Faults of one call."""

    THROTTLED = "throttled"
    SERVER_ERROR = "server_error"
    TIMEOUT_BEFORE = "timeout_before_applying"
    TIMEOUT_AFTER = "timeout_after_applying"
    CRASH_BEFORE = "crash_before"
    CRASH_AFTER = "crash_after"
    PAUSE_BEFORE = "pause_before"
    PAUSE_AFTER = "pause_after"
    HUNG = "hung"
    """The request takes seconds; the host's other tasks continue."""

    LANDS_LATE = "lands_late"
    """The caller gets a time-out; the write is applied later.

    It is applied after some seconds, if its conditions still hold.
    """


AWS_SITES: Final = (
    *(f"leases.{o}" for o in ("GetItem", "UpdateItem", "DeleteItem", "Scan", "Query")),
    "leases.TransactWriteItems",
    *(f"workers.{o}" for o in ("UpdateItem", "Scan", "DeleteItem")),
    *(f"coordinator.{o}" for o in ("GetItem", "PutItem", "UpdateItem", "DeleteItem")),
    *(
        f"kinesis.{o}"
        for o in ("DescribeStreamSummary", "ListShards", "GetShardIterator", "GetRecords")
    ),
)
LOCK_WRITES: Final = ("coordinator.PutItem", "coordinator.UpdateItem")
SINK_SITES: Final = ("sink.positions", "sink.commit", "sink.ensure", "sink.write_dead_letters")
SITES: Final = (*AWS_SITES, *SINK_SITES)
TABLE_READS: Final = frozenset(
    site for site in AWS_SITES if site.endswith((".GetItem", ".Scan", ".Query"))
)
_THROTTLABLE: Final = frozenset(AWS_SITES)
_SINK_FAULTS: Final = {
    Fault.SERVER_ERROR: SinkFault.FAIL,
    Fault.TIMEOUT_BEFORE: SinkFault.LAND_LATE,
    Fault.TIMEOUT_AFTER: SinkFault.LAND_AND_FAIL,
    Fault.THROTTLED: SinkFault.LOSE_RACE,
}
_WRITES: Final = ("PutItem", "UpdateItem", "DeleteItem", "TransactWriteItems")
_HUNG_SECONDS: Final = (3.0, 10.0)
_LATE_SECONDS: Final = 4.0
_THROTTLED_SHARE: Final = 0.5
_HUNG_SHARE: Final = 0.2


def applicable(site: str, fault: Fault) -> bool:
    """Whether a fault can happen at a call site.

    Only commits can be applied late or lose a race for the log. Only writes to a table
    can be delayed in the network.
    """
    if fault is Fault.LANDS_LATE:
        return site in _THROTTLABLE and site.partition(".")[2] in _WRITES
    if fault is Fault.HUNG:
        return site in _THROTTLABLE
    if site == "sink.commit" or site in _THROTTLABLE:
        return True
    return fault not in (Fault.THROTTLED, Fault.TIMEOUT_BEFORE, Fault.TIMEOUT_AFTER)


EXPIRED_ITERATOR: Final = ("kinesis.GetRecords", "expired_iterator")


@dataclass
class Weather:
    """The current probability of faults.

    Attributes:
        chance: Probability per call.
        partitioned: Hosts that cannot reach AWS.
        steered: One (site, fault) that always happens at call number `steered_call` of its site.
        throttled: The tables, or "kinesis", of which every other call is throttled.
        throttled_sites: Calls of which every other one is throttled.
        hanging: Calls that hang with some probability: (host, site).
        down: Services whose calls all fail: "kinesis" or "sink".
        down_sites: Calls that all fail.
        denied: Hosts whose credentials are rejected.
        rare_sites: How many times `chance` is the probability of a fault at these sites.
    """

    rng: random.Random
    chance: float = 0.0
    partitioned: set[str] = field(default_factory=set)
    long_pause_seconds: float = 6.0
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    note: Callable[[str], None] = lambda _text: None
    deadly: bool = True
    steered: tuple[str, Fault] | None = None
    steered_call: int = 1
    throttled: set[str] = field(default_factory=set)
    throttled_sites: set[str] = field(default_factory=set)
    hanging: set[tuple[str, str]] = field(default_factory=set)
    down: set[str] = field(default_factory=set)
    down_sites: set[str] = field(default_factory=set)
    denied: set[str] = field(default_factory=set)
    rare_sites: Mapping[str, float] = field(default_factory=dict)

    def draw(self, host: Host, site: str) -> Fault | None:
        """Return the fault of this call, or None."""
        if self.partitioned and host.name in self.partitioned and site in _THROTTLABLE:
            return self._count(host, site, Fault.TIMEOUT_BEFORE)
        if site in self.down_sites or (self.down and site.partition(".")[0] in self.down):
            return self._count(host, site, Fault.SERVER_ERROR)
        if self.steered is not None and self.steered[0] == site and self.deadly:
            self.steered_call -= 1
            if self.steered_call <= 0:
                fault, self.steered = self.steered[1], None
                return self._count(host, site, fault)
        if (
            (self.throttled or self.throttled_sites)
            and (site in self.throttled_sites or site.partition(".")[0] in self.throttled)
            and self.rng.random() < _THROTTLED_SHARE
        ):
            return self._count(host, site, Fault.THROTTLED)
        if self.hanging and (host.name, site) in self.hanging and self.rng.random() < _HUNG_SHARE:
            return self._count(host, site, Fault.HUNG)
        if self.rng.random() >= self.chance * self.rare_sites.get(site, 1.0):
            return None
        fault = self.rng.choice(tuple(Fault))
        if not applicable(site, fault):
            return None
        if (
            fault in (Fault.CRASH_BEFORE, Fault.CRASH_AFTER, Fault.PAUSE_BEFORE, Fault.PAUSE_AFTER)
            and not self.deadly
        ):
            return None
        return self._count(host, site, fault)

    def clear(self) -> None:
        """End all faults."""
        self.chance = 0.0
        self.steered = None
        for broken in (self.partitioned, self.throttled, self.throttled_sites, self.down):
            broken.clear()
        self.down_sites.clear()
        self.hanging.clear()
        self.denied.clear()

    def reaches_nothing(self, host: Host) -> bool:
        """Whether a host cannot reach AWS."""
        return host.name in self.partitioned

    def _count(self, host: Host, site: str, fault: Fault) -> Fault:
        self.counts[(site, fault)] += 1
        self.note(f"{host.name}: {fault} at {site}")
        return fault


class Calls:
    """The I/O calls of one host."""

    def __init__(self, host: Host, weather: Weather) -> None:
        self._host = host
        self._weather = weather
        self._open: dict[object, Fault | None] = {}

    def latency(self) -> float:
        """Half a round-trip time."""
        return 0.001 + self._weather.rng.random() * 0.006

    def before(self, site: str, applied: Callable[[], None] = lambda: None) -> None:
        """Simulate the time and faults before the effect of a call.

        `applied` is called after the effect of a write that is applied late.
        """
        if self._weather.denied and self._host.name in self._weather.denied:
            self._deny(site)
        fault = self._weather.draw(self._host, site)
        scheduler = self._host.scheduler
        self._open[scheduler.current()] = fault
        self._strike(fault, Fault.CRASH_BEFORE, Fault.PAUSE_BEFORE)
        scheduler.pause(self.latency())
        if fault is None:
            return
        operation = site.partition(".")[2]
        if fault is Fault.THROTTLED:
            raise ThrottledError(
                f"{site} was throttled",
                code="ProvisionedThroughputExceededException",
                operation=operation,
            )
        if fault is Fault.SERVER_ERROR:
            raise UnavailableError(
                f"{site} failed with a server error",
                code="InternalServerError",
                operation=operation,
            )
        if fault is Fault.HUNG:
            seconds = self._weather.rng.uniform(*_HUNG_SECONDS)
            self._host.hung_until = max(self._host.hung_until, scheduler.now + seconds)
            scheduler.pause(seconds)
        if fault in (Fault.TIMEOUT_BEFORE, Fault.LANDS_LATE):
            scheduler.pause(0.3)
            error = UnavailableError(f"{site} timed out", code="ReadTimeout", operation=operation)
            if fault is Fault.TIMEOUT_BEFORE:
                raise error
            raise LandsLate(error, partial(self._apply_late, applied))

    def _apply_late(self, applied: Callable[[], None], apply: Callable[[], object]) -> None:
        """Apply a write that is already in the network; a crash of the host does not stop it.

        It has no effect on a table that was deleted meanwhile.
        """
        scheduler = self._host.scheduler

        def land() -> None:
            scheduler.pause(self._weather.rng.random() * _LATE_SECONDS)
            with suppress(NotFoundError):
                apply()
                applied()

        scheduler.spawn(Host("network", scheduler), "late write", land)

    def _deny(self, site: str) -> None:
        """Reject a call of a host whose credentials have expired."""
        if site not in _THROTTLABLE:
            return
        self._host.scheduler.pause(self.latency())
        operation = site.partition(".")[2]
        raise AccessDeniedError(
            f"{site} was denied", code="ExpiredTokenException", operation=operation
        )

    def after(self, site: str) -> None:
        """Simulate the time and faults from the effect to the response."""
        fault = self._open.pop(self._host.scheduler.current(), None)
        self._strike(fault, Fault.CRASH_AFTER, Fault.PAUSE_AFTER)
        self._host.scheduler.pause(self.latency())
        if fault is Fault.TIMEOUT_AFTER:
            raise UnavailableError(
                f"{site} timed out", code="ReadTimeout", operation=site.partition(".")[2]
            )

    @contextmanager
    def call(self, site: str) -> Iterator[None]:
        """Run `before` and `after` around an effect."""
        self.before(site)
        yield
        self.after(site)

    def sink_fault(self, site: str) -> SinkFault | None:
        """Return the fault of a sink call.

        The sink lets time pass by itself. Crashes and pauses happen before the call starts.
        """
        fault = self._weather.draw(self._host, site)
        self._strike(fault, Fault.CRASH_BEFORE, Fault.PAUSE_BEFORE)
        if fault in (Fault.CRASH_AFTER, Fault.PAUSE_AFTER):
            self._later(fault)
            return None
        return None if fault is None else _SINK_FAULTS.get(fault)

    def _later(self, fault: Fault) -> None:
        host, seconds = self._host, self._weather.long_pause_seconds

        def strike() -> None:
            self._host.scheduler.pause(self._weather.rng.random() * 0.03)
            if fault is Fault.CRASH_AFTER:
                host.crash()
            else:
                host.pause(seconds)

        self._host.scheduler.spawn(Host("fate", host.scheduler), "strike", strike)

    def _strike(self, fault: Fault | None, crash: Fault, pause: Fault) -> None:
        if fault is crash:
            self._host.crash()
        elif fault is pause:
            self._host.pause(self._weather.long_pause_seconds)

    def expired(self) -> ExpiredIteratorError | None:
        """Return an error for an expired iterator, at random."""
        if self._weather.rng.random() < self._weather.chance:
            self._weather.counts[EXPIRED_ITERATOR] += 1
            return ExpiredIteratorError(
                "the iterator expired", code="ExpiredIteratorException", operation="GetRecords"
            )
        return None
