"""Incidents of people with the table: a copy that is put back, a RESTORE, and a seek under load.

Each concerns only fleets that store positions and begin at TRIM_HORIZON. The counter of an incident
counts its attempts; the one with "(done)" those that changed the table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final

from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.control.seek import Seeking, SeekTarget
from kcl_pipeline.errors import KclError
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.testing.sink import InMemorySink
from verification.simulation.environment.calls import Calls, Weather
from verification.simulation.environment.kinesis import SimulatedKinesis
from verification.simulation.environment.scheduler import Host, SimulatedClock
from verification.simulation.incidents.hosts import SENSOR, STRATEGIES
from verification.simulation.scenario import settings
from verification.simulation.world import World

SEEK_SECONDS: Final = 8.0
"""Longest wait of a seek for the workers to end."""


class TableIncidents:
    """Incidents, one per method.

    Args:
        world: The world.
        rng: Draws times and versions.
        later: Calls a function after some seconds.
        delete_rows: Deletes all lease rows.
    """

    def __init__(
        self,
        world: World,
        rng: Random,
        later: Callable[[float, Callable[[], None]], None],
        delete_rows: Callable[[], None],
    ) -> None:
        self.world = world
        self.rng = rng
        self._later = later
        self._delete_rows = delete_rows

    def _concerned(self) -> bool:
        scenario = self.world.scenario
        return (
            scenario.stores_positions
            and scenario.initial_position == "TRIM_HORIZON"
            and self.world.sink_table.version > 0
        )

    def _done(self, incident: str) -> None:
        self.world.weather.counts[("incident", f"{incident} (done)")] += 1

    def put_back_table(self) -> None:
        """Put an older copy of the table's folder back; then delete the lease rows.

        Leases whose row has a mark after the position in the copy stop. The message of their error
        says that they continue after the position in the table when their row is deleted.
        """
        if not self._concerned():
            return
        copy = self.world.sink_table.copy()

        def put_back() -> None:
            if self.world.sink_table.put_back(copy):
                self.world.note("puts a copy of the table back")
                self._done("put_back_table")
                self._later(self.rng.uniform(1.0, 3.0), self._delete_rows)

        self._later(self.rng.uniform(1.0, 4.0), put_back)

    def restore_table(self) -> None:
        """Run a RESTORE: rows of the newest versions go, the positions stay.

        Nobody reads these rows again.
        """
        if self._concerned() and self.world.sink_table.restore(self.rng.randint(1, 5)):
            self.world.note("restores an older version of the table")
            self._done("restore_table")

    def seek(self) -> None:
        """Seek all shards to TRIM_HORIZON while the fleet works; a supervisor restarts workers."""
        world = self.world
        exists = world.coordinator.store.exists()
        is_known = exists and world.coordinator.read_application() is not None
        if self._concerned() and is_known and not world.seeks:
            host = Host(f"operator#{len(world.lines)}", world.scheduler)
            world.seeks += 1
            host.spawn("seek", partial(self._seek, host))

    def _seek(self, host: Host) -> None:
        world, clock = self.world, SimulatedClock(host)
        calls = Calls(host, Weather(Random(f"{world.seed}/{host.name}")))
        tables = world.tables(world.machines[SENSOR], calls, "operator")
        app = ApplicationControl(settings(world.scenario, STRATEGIES[0]), *tables, clock, "ann")
        target = SeekTarget("TRIM_HORIZON", TRIM_HORIZON)
        sink = InMemorySink(world.sink_table, clock=clock, latency_seconds=calls.latency())
        kinesis = SimulatedKinesis(world.streams, calls)
        try:
            done = Seeking(app, kinesis, target, sink=sink).write(
                host.name, pause=True, wait_seconds=SEEK_SECONDS
            )
            if not done.refused:
                self._done("seek")
        except KclError as error:
            world.note(f"the seek failed: {error}")
        finally:
            world.seeks -= 1
