"""Which standbys read the tables, what they read, and how often."""

from __future__ import annotations

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.leader.liveness.liveness import Liveness
from kcl_pipeline.leader.reads.standby import StandbyWatch
from kcl_pipeline.leader.reads.tables import TableReads
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.migration import ClientVersion
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.position import LATEST
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
    create_lease,
)

SETTINGS = ConsumerSettings(application_name="orders", streams=("orders",))


class Standby:
    """One lease for each of `owners`; the owners have rows and report every ten seconds."""

    def __init__(self, own_id, owners, *, changes=None, leases_per_probe=0, rows=()):
        self.clock, self.events, self.scans, self.probes = VirtualClock(), [], [], []
        self.row_reads, self.error, self.scan_seconds = [], None, 0.0
        self.leases = InMemoryLeaseTable(clock=self.clock)
        self.workers = InMemoryWorkerMetricsTable(clock=self.clock)
        for number, owner in enumerate(owners):
            create_lease(self.leases, Lease(f"s{number:03}", LATEST, owner=owner))
        self.names, self.changes, self.reported = sorted({*owners, *rows}), changes, -10
        self.liveness = Liveness(SETTINGS, own_id)
        tables = (self.leases, self.workers)
        coordinator = InMemoryCoordinatorStateTable(clock=self.clock)
        version = ClientVersion(coordinator, own_id, self.clock, SETTINGS.client_version_config)
        own = (self.clock, self.liveness, map, version, leases_per_probe)
        reads = TableReads(SETTINGS, *tables, *own)
        self.watch = StandbyWatch(
            SETTINGS, own_id, self.liveness, reads, self.clock, self.events.append
        )
        self.report()
        self.leases.store.before_call = self._lease_call
        self.workers.store.before_call = self._worker_call

    def report(self):
        if self.clock.monotonic() - self.reported >= 10:
            self.reported = self.clock.monotonic()
            for name in self.names:
                row = WorkerMetrics(
                    name, int(self.clock.wall()), run_id=f"{name}-run", changes=self.changes
                )
                self.workers.report(row)

    def _lease_call(self, operation, key):
        if operation == "Scan":
            self.scans.append(self.clock.monotonic())
            if self.error is not None:
                raise self.error
            self.clock.advance(self.scan_seconds)
        elif operation == "GetItem":
            self.probes.append(key)

    def _worker_call(self, operation, key):
        if operation == "Scan":
            self.row_reads.append(self.clock.monotonic())

    def run(self, seconds, unchanged_share=0.0, leader="leader"):
        """Scans within these seconds, with a look every half second."""
        before, end = len(self.scans), self.clock.monotonic() + seconds
        while self.clock.monotonic() < end:
            self.report()
            self.watch.look(leader, unchanged_share)
            self.clock.advance(0.5)
        return len(self.scans) - before


OWNERS = ["leader", "a", "b", "c", "d"]


@pytest.mark.parametrize("own_id", ["a", "b"])
def test_two_standbys_read_all_the_time_and_scan_every_minute(own_id):
    standby = Standby(own_id, OWNERS, changes=0)
    assert standby.run(240) == 4
    assert set(standby.probes) == {"s000"}, "only the lease of the leader"
    assert len(standby.probes) == 116
    assert 24 <= len(standby.row_reads) <= 28


@pytest.mark.parametrize("own_id", ["a", "b"])
def test_they_scan_all_the_time_if_workers_announce_no_changes(own_id):
    assert Standby(own_id, OWNERS).run(60) == 30


def test_they_scan_a_small_table_all_the_time():
    assert Standby("a", OWNERS, changes=0, leases_per_probe=16).run(60) == 30


@pytest.mark.parametrize("own_id", ["c", "d", "without-lease"])
def test_the_others_scan_when_the_lock_is_not_renewed(own_id):
    standby = Standby(own_id, OWNERS, changes=0, rows=["without-lease"])
    assert standby.run(300) == 1
    assert len(standby.row_reads) == 5
    assert standby.run(10, unchanged_share=0.4) == 0
    assert standby.run(10, unchanged_share=0.5) == 5


def test_a_standby_that_watches_scans_when_the_lock_is_not_renewed():
    standby = Standby("a", OWNERS, changes=0)
    standby.run(10)
    assert standby.run(10, unchanged_share=0.5) == 5


def test_a_standby_dates_the_last_renewal_of_the_leader():
    """A scan after that renewal is not one, so the leases of the leader expire as soon."""
    standby = Standby("a", ["leader", "leader", "a"], changes=0)
    for second in range(30):
        if second % 3 == 0 and second < 16:
            for key in ("s000", "s001"):
                assert standby.leases.renew(standby.leases.get(key)) is not None
        standby.run(1, unchanged_share=0.5 if second >= 20 else 0.0)
    now = standby.clock.monotonic()
    assert standby.liveness.observation(now).expired == {"s000", "s001", "s002"}
    waited = standby.liveness.observation(now).waited_seconds
    assert waited["s000"] == waited["s001"]
    assert 12 <= waited["s001"] <= 15


def test_rows_of_workers_that_stopped_do_not_count():
    """The first scan counts the owners of leases, and later reads the rows that change."""
    standby = Standby("d", OWNERS, changes=0, rows=["0", "1", "2"])
    assert standby.watch.look("leader", 0.0) is None
    assert standby.watch._workers == 4
    standby.names = ["leader", "c", "d", "e"]
    assert not standby.watch.is_watcher
    standby.run(200)
    assert standby.watch._workers == 3
    assert standby.watch.is_watcher


def test_the_scans_of_a_large_fleet_do_not_grow_with_its_square():
    standby = Standby("z", [f"w{n:03}" for n in range(100)], changes=0)
    standby.run(10)
    assert standby.run(3_000) == 0
    assert len(standby.row_reads) == 11


def test_a_long_scan_takes_a_fifth_of_the_time():
    standby = Standby("a", ["a"])
    standby.scan_seconds = 5.0
    assert standby.run(250) == pytest.approx(12, abs=2)


def test_a_lease_of_the_leader_that_moved_causes_a_scan():
    standby = Standby("a", OWNERS, changes=0)
    standby.run(10)
    lease = standby.leases.get("s000")
    assert standby.leases.assign(lease, "c") is not None
    assert standby.run(5) == 1


def test_an_error_is_an_event_and_the_next_look_tries_again():
    standby = Standby("a", ["a"])
    standby.error = UnavailableError("timed out", operation="Scan")
    assert standby.run(4) == 2
    assert standby.events == [AwsTrouble("scan of a standby leader", "timed out")] * 2
    standby.error = None
    assert standby.run(4) == 2
