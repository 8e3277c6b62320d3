"""Three workers, a crude leader, lost requests and answers, and long pauses, in virtual time: who
may write a lease, and with which numbers.
"""

import random
from contextlib import suppress

import pytest

from kcl_pipeline.config import LeaseSettings
from kcl_pipeline.errors import LeaseLostError, ThrottledError, UnavailableError
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.testing.tables import InMemoryLeaseTable, create_lease
from tests.support.shortened import shortened
from verification.simulation.environment.scheduler import Host, Scheduler, SimulatedClock

KEYS = tuple(f"shardId-{n}" for n in range(4))
WORKERS = ("w0", "w1", "w2")
TROUBLE_SECONDS = 300.0
CALM_SECONDS = 120.0


class Fleet:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(seed)
        self.shared = Host("table", self.scheduler)
        self.table = InMemoryLeaseTable(
            "app", clock=SimulatedClock(self.shared), index_lag_seconds=0.5, scan_lag_seconds=0.5
        )
        for key in KEYS:
            create_lease(self.table, Lease(key, TRIM_HORIZON))
        self.written = {key: [] for key in KEYS}
        self.faults = {"before": 0, "after": 0, "pauses": 0, "lost": 0}
        self.workers = [self._worker(name) for name in WORKERS]
        self._leader()

    @property
    def troubled(self):
        return self.scheduler.now < TROUBLE_SECONDS

    def _view(self, host):
        def before(operation, key):
            self.scheduler.pause(self.rng.uniform(0.001, 0.05))
            if self.troubled and self.rng.random() < 0.01:
                self.faults["pauses"] += 1
                host.pause(self.rng.uniform(5, 25))
                self.scheduler.pause(0.001)
            if self.troubled and self.rng.random() < 0.03:
                self.faults["before"] += 1
                raise self.rng.choice((ThrottledError, UnavailableError))(
                    "before", operation=operation
                )

        def after(operation, key):
            if self.troubled and self.rng.random() < 0.05:
                self.faults["after"] += 1
                raise UnavailableError("after", operation=operation)
            self.scheduler.pause(self.rng.uniform(0.001, 0.05))

        return self.table.view(before_call=before, after_call=after)

    def _worker(self, name):
        host = Host(name, self.scheduler)
        clock = SimulatedClock(host)
        leases = HeldLeases(self._view(host), name, LeaseSettings(), clock, lambda event: None)

        def renewing():
            while True:
                leases.renew_all()
                clock.sleep(3.3)

        def discovering():
            while True:
                with suppress(ThrottledError, UnavailableError):
                    leases.discover()
                for held in leases.handoffs():
                    with suppress(ThrottledError, UnavailableError):
                        leases.complete_handoff(held)
                clock.sleep(2)

        def processing():
            while True:
                for held in leases.held():
                    self._process(leases, held)
                clock.sleep(0.5)

        for loop in (renewing, discovering, processing):
            host.spawn(loop.__name__, loop)
        return leases

    def _process(self, leases, held):
        try:
            before = held.lease.checkpoint
            after = Position("1" if before.is_sentinel else str(int(before.sequence_number) + 1))
            row = leases.checkpoint(held, checkpoint=after)
            self.written[held.lease_key].append(row.checkpoint)
            if self.troubled and self.rng.random() < 0.02:
                leases.release(held)
        except (ThrottledError, UnavailableError):
            pass
        except LeaseLostError:
            self.faults["lost"] += 1

    def _lead(self, table, lease, seen, now):
        if seen.get(lease.lease_key, (None, 0.0))[0] != lease.counter:
            seen[lease.lease_key] = (lease.counter, now)
        if lease.actual_owner is None or now - seen[lease.lease_key][1] > 10:
            table.assign(lease, self.rng.choice(WORKERS))
        elif self.troubled and not lease.in_handoff and self.rng.random() < 0.05:
            table.initiate_handoff(lease, self.rng.choice(WORKERS))

    def _leader(self):
        host = Host("leader", self.scheduler)
        clock = SimulatedClock(host)
        table = self._view(host)
        seen = {}

        def leading():
            while True:
                with suppress(ThrottledError, UnavailableError):
                    for lease in table.list_leases().leases:
                        self._lead(table, lease, seen, clock.monotonic())
                clock.sleep(4)

        host.spawn("leading", leading)


@pytest.mark.parametrize("seed", shortened(range(20), lambda seed: seed < 7))
def test_a_checkpoint_is_written_by_one_worker_and_the_fleet_recovers(seed):
    fleet = Fleet(seed)
    fleet.scheduler.run(seconds=TROUBLE_SECONDS + CALM_SECONDS)
    try:
        for key, numbers in fleet.written.items():
            assert len(numbers) == len(set(numbers)), f"seed {seed}: {key} was written twice"
            assert fleet.table.get(key).checkpoint >= max(numbers)
        assert sum(len(numbers) for numbers in fleet.written.values()) > 500
        assert all(count > 0 for count in fleet.faults.values()), fleet.faults
        assert sorted(held.lease_key for leases in fleet.workers for held in leases.held()) == list(
            KEYS
        )
    finally:
        fleet.scheduler.close()
