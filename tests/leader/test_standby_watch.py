"""Which standbys scan the tables, and how often."""

from __future__ import annotations

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import ThrottledError
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.leader.liveness import Liveness
from kcl_pipeline.leader.phase import Scan
from kcl_pipeline.leader.standby_watch import StandbyWatch
from kcl_pipeline.leases.lease import Lease
from kcl_pipeline.position import LATEST
from kcl_pipeline.testing.clock import VirtualClock

SETTINGS = ConsumerSettings(application_name="orders", streams=("orders",))


class Standby:
    def __init__(self, own_id, owners, scan_seconds=0.0):
        self.clock, self.events, self.scans, self.error = VirtualClock(), [], [], None
        self._leases = tuple(Lease(f"s{n}", LATEST, owner=o) for n, o in enumerate(owners))
        self._scan_seconds = scan_seconds
        self.watch = StandbyWatch(
            SETTINGS, own_id, Liveness(SETTINGS, own_id), self._scan, self.clock, self.events.append
        )

    def _scan(self):
        now = self.clock.monotonic()
        self.scans.append(now)
        if self.error is not None:
            raise self.error
        self.clock.advance(self._scan_seconds)
        return Scan(self._leases, frozenset(), (), (), (), now, self.clock.monotonic())

    def run(self, seconds, unchanged_share=0.0):
        """Scans within these seconds, with a look every half second."""
        before, end = len(self.scans), self.clock.monotonic() + seconds
        while self.clock.monotonic() < end:
            self.watch.look("leader", unchanged_share)
            self.clock.advance(0.5)
        return len(self.scans) - before


@pytest.mark.parametrize("own_id", ["a", "b"])
def test_two_standbys_scan_all_the_time(own_id):
    standby = Standby(own_id, ["leader", "a", "b", "c", "d"])
    assert standby.run(60) == 30


@pytest.mark.parametrize("own_id", ["c", "d", "without-lease"])
def test_the_others_scan_when_the_lock_is_not_renewed(own_id):
    standby = Standby(own_id, ["leader", "a", "b", "c", "d"])
    assert standby.run(60) == 1
    assert standby.run(10, unchanged_share=0.3) == 1
    assert standby.run(10, unchanged_share=0.4) == 5


def test_the_scans_of_a_large_fleet_do_not_grow_with_its_square():
    standby = Standby("z", [f"w{n:03}" for n in range(100)])
    standby.run(10)
    assert standby.run(3_000) == 10


def test_a_long_scan_takes_a_fifth_of_the_time():
    standby = Standby("a", ["a"], scan_seconds=5.0)
    assert standby.run(250) == pytest.approx(12, abs=2)


def test_an_error_is_an_event_and_the_next_look_tries_again():
    standby = Standby("a", ["a"])
    standby.error = ThrottledError("slow down", operation="Scan")
    assert standby.run(4) == 2
    assert standby.events == [AwsTrouble("scan of a standby leader", "slow down")] * 2
    standby.error = None
    assert standby.run(4) == 2
