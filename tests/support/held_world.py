"""One worker's HeldLeases on an in-memory table, and a leader's view of it."""

import pytest

from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.tables import InMemoryLeaseTable, create_lease

END = Position("100")
SETTINGS = LeaseSettings()


class World:
    def __init__(self, clock=None, settings=SETTINGS):
        self.clock = clock or VirtualClock()
        self.table = InMemoryLeaseTable("app", clock=self.clock)
        self.leader = self.table.view()
        self.events = []
        self.leases = HeldLeases(self.table, "w1", settings, self.clock, self.events.append)

    def assign(self, *keys, owner="w1"):
        for key in keys:
            create_lease(self.leader, Lease(key, TRIM_HORIZON))
            self.leader.assign(self.leader.get(key), owner)

    def gain(self, key="s0"):
        self.assign(key)
        (held,) = self.leases.discover()
        return held

    def fail_once(self, operation, error, *, applied):
        def hook(called, key):
            if called == operation:
                self.table.hook(None, None)
                raise error

        self.table.hook(None if applied else hook, hook if applied else None)

    def lose_answer(self, operation="UpdateItem"):
        self.fail_once(operation, UnavailableError("no answer", operation=operation), applied=True)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture(name="world")
def world_fixture():
    return World()
