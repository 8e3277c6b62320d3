"""Workers of this package beside workers of the Java KCL, on the virtual clock.

`Java27` and `Java3` do what a Java worker does with the tables. The rows of the client version are
those that Java 3.x and KCL's migration tool write.
"""

from __future__ import annotations

from random import Random

from kcl_pipeline.events import ClientVersionChanged
from kcl_pipeline.leader.kcl2 import LeaseTaker
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.testing.tables import create_lease
from tests.worker.test_coordination import Fleet

COMPATIBLE = {"client_version_config": "CLIENT_VERSION_CONFIG_COMPATIBLE_WITH_2X"}
UPGRADE, V2, ROLLBACK, V3 = (
    f"CLIENT_VERSION_{name}" for name in ("UPGRADE_FROM_2X", "2X", "3X_WITH_ROLLBACK", "3X")
)
STEP = 0.5


class Java27:
    """A worker of KCL 2.7: it renews every third of the failover time, and takes leases."""

    def __init__(self, name: str, fleet: Mixed) -> None:
        self.name = name
        self.fleet = fleet
        self.taker = LeaseTaker(
            name, fleet.settings, fleet.leases, fleet.clock, fleet.events.append, Random(name)
        )
        self.held: dict[str, Lease] = {}
        self.next_renewal = self.next_take = 0.0

    def tick(self) -> None:
        now = self.fleet.clock.monotonic()
        if now >= self.next_renewal:
            self.next_renewal = now + 0.3
            for key, lease in list(self.held.items()):
                renewed = self.fleet.leases.renew(lease)
                if renewed is None or renewed.in_handoff:
                    del self.held[key]  # 2.7 does not know handoffs
                else:
                    self.held[key] = renewed
        if now >= self.next_take:
            self.next_take = now + 2.0
            for key in self.taker.run().taken:
                self.held[key] = self.fleet.leases.get(key)


class Java3:
    """A worker of KCL 3.x that does not lead: it reports, discovers, renews, hands over."""

    def __init__(self, name: str, fleet: Mixed) -> None:
        self.name = name
        self.fleet = fleet
        self.held: dict[str, Lease] = {}
        self.next_renewal = self.next_discovery = self.next_report = 0.0

    def tick(self) -> None:
        fleet, now = self.fleet, self.fleet.clock.monotonic()
        if now >= self.next_report:
            self.next_report = now + 30
            row = WorkerMetrics(self.name, int(fleet.clock.wall()), support_code=1)
            fleet.rows.report(row)
        if now >= self.next_discovery:
            self.next_discovery = now + 1
            for key in fleet.leases.lease_keys_of(self.name):
                lease = fleet.leases.get(key)
                if lease is not None and lease.owner == self.name and not lease.in_handoff:
                    self.held.setdefault(key, lease)
        if now >= self.next_renewal:
            self.next_renewal = now + 0.3
            for key, lease in list(self.held.items()):
                renewed = fleet.leases.renew(lease)
                if renewed is None:
                    del self.held[key]
                elif renewed.in_handoff:
                    fleet.leases.assign(renewed, renewed.owner)
                    del self.held[key]
                else:
                    self.held[key] = renewed


class Mixed(Fleet):
    """Workers of this package beside workers of KCL 2.7."""

    def __init__(self, **settings):
        super().__init__(**(COMPATIBLE | settings))
        self.java: dict[str, Java27 | Java3] = {}

    def make_tables(self):
        """The application exists: it has a lease table, and neither of the other two."""
        tables = super().make_tables()
        tables[0].ensure_exists()
        stream = self.kinesis.resolve_stream("orders", multi_stream=False)
        for shard in self.kinesis.list_shards(stream):
            keys = shard.hash_key_range
            create_lease(tables[0], Lease(shard.shard_id, TRIM_HORIZON, hash_key_range=keys))
        return tables

    def join_java(self, *names: str, kind: type[Java27 | Java3] = Java27) -> None:
        for name in names:
            self.java[name] = kind(name, self)

    def run(self, seconds=10.0, step=STEP):
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until:
            for one in list(self.java.values()):
                one.tick()
            super().run(step, step)

    def version(self) -> str:
        found = self.coordinator.read_migration()
        assert found is not None
        return found.client_version

    def tool(self, before: str, after: str, mode: str) -> None:
        """KCL's `KclMigrationTool.py` changes the row on the condition of the former version."""
        found = self.coordinator.read_migration()
        assert found is not None
        assert found.client_version == before
        history = [
            {"M": {"cv": {"S": cv}, "mb": {"S": mb}, "mts": {"N": str(mts)}}}
            for cv, mb, mts in ((before, found.modified_by, found.modified_millis), *found.history)
        ]
        item = self.coordinator.store.get("Migration3.0")
        item |= {
            "cv": {"S": after},
            "mb": {"S": f"KclMigrationTool-{mode}"},
            "mts": {"N": str(int(self.clock.wall() * 1000))},
            "h": {"L": history},
        }
        self.coordinator.store._rows["Migration3.0"] = item

    def versions(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys((e.before, e.after) for e in self.of(ClientVersionChanged)))
