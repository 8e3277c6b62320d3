"""Incidents of whole streams and of reads: streams come, go and return; reads hang or throttle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final

from verification.simulation.environment.calls import TABLE_READS
from verification.simulation.environment.streams import OTHER_ACCOUNT, Generation, arn_of
from verification.simulation.world import World

NEW_STREAM: Final = "clicks"
PAGE_ROWS: Final = 2
HANGING: Final = (
    ("leases.UpdateItem", "workers.UpdateItem"),
    ("leases.Scan", "workers.Scan"),
    ("kinesis.GetRecords",),
)
"""The calls that hang together: renewals and reports, scans, or pages of records."""

_YOUNGEST_SECONDS: Final = 1.1
"""A stream lives longer than a second, because lease keys have its creation time in seconds."""


@dataclass(slots=True)
class StreamIncidents:
    """Incidents, one per method."""

    world: World
    rng: Random
    shards: int
    """Initial number of shards of each stream."""
    later: Callable[[float, Callable[[], None]], None]
    _started: int = field(default=0, init=False)

    def stream_comes(self) -> None:
        """Create a stream and start a worker whose settings name it, too. The others run on."""
        self._come(NEW_STREAM)

    def namesake_comes(self) -> None:
        """Add a stream of another account that has the name of a configured one."""
        names = [ref for ref in self.world.configured if not ref.startswith("arn:")]
        self._come(arn_of(OTHER_ACCOUNT, self.rng.choice(names)))

    def _come(self, ref: str) -> None:
        world = self.world
        if len(world.scenario.streams) == 1 or ref in world.configured:
            return  # Several streams instead of one are another application.
        world.streams.create(ref, self.rng.randint(1, self.shards))
        world.configured += (ref,)
        self._started += 1
        world.start(f"c{self._started}", strategy="balanced", is_worker=True)

    def stream_goes(self) -> None:
        """Delete one of several streams for good. A single one returns."""
        chosen = self._deletable()
        if chosen is None:
            return
        self._delete(chosen)
        if not self.world.streams.current:
            self._return_later(chosen.ref)

    def stream_returns(self) -> None:
        """Delete a stream, and create it again at once or later."""
        chosen = self._deletable()
        if chosen is not None:
            self._delete(chosen)
            self._return_later(chosen.ref)

    def _deletable(self) -> Generation | None:
        """A stream whose deletion can be noticed, or None.

        A single stream that was never recorded is not known to have been another one.
        """
        world = self.world
        exists = world.coordinator.store.exists()
        if len(world.configured) == 1 and not (
            exists and world.coordinator.read_application() is not None
        ):
            return None
        now = world.streams.model.world.now_millis()
        old = now - _YOUNGEST_SECONDS * 1000
        found = [one for one in world.streams.current.values() if one.stream.created_millis < old]
        return self.rng.choice(found) if found else None

    def _delete(self, chosen: Generation) -> None:
        world = self.world
        world.note(f"deletes the stream {chosen.label}")
        world.streams.delete(chosen.ref)
        world.checks.deleted(chosen)
        world.unavailable.discard(chosen.stream.arn)

    def _return_later(self, ref: str) -> None:
        shards = self.rng.randint(1, self.shards)
        self.world.returning[ref] = shards
        self.later(
            self.rng.choice((0.0, self.rng.uniform(0.5, 8.0))),
            partial(self.world.return_stream, ref),
        )

    def throttled_reads(self) -> None:
        """Throttle half of all reads of the tables, whose scans have small pages from now on."""
        world = self.world
        world.small_pages(PAGE_ROWS)
        world.weather.throttled_sites |= TABLE_READS
        self.later(self.rng.uniform(3.0, 12.0), world.weather.throttled_sites.clear)

    def hung_calls(self) -> None:
        """Let calls of one kind hang, on one host or on all."""
        weather = self.world.weather
        hosts = [machine.host.name for machine in self.world.machines.values()]
        if self.rng.random() < 0.5:  # noqa: PLR2004 (one host in half of the cases)
            hosts = [self.rng.choice(hosts)]
        hanging = {(host, site) for host in hosts for site in self.rng.choice(HANGING)}
        weather.hanging |= hanging
        self.later(self.rng.uniform(0.5, 3.0), lambda: weather.hanging.difference_update(hanging))
