"""Which processes scan while another one leads: the two smallest worker ids whose row moves."""

from __future__ import annotations

from collections import Counter

import pytest

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.leases.workers import WorkerMetrics
from tests.support.leader_fleet import LeaderFleet


class Watched(LeaderFleet):
    """Workers `a` to `f`, each with a candidate, and one with a row that does not move."""

    def __init__(self, names="abcdef", **options):
        super().__init__(shards=len(names), **options)
        self.scans = Counter()
        self.slow_calls = self._note
        self.rows.report(WorkerMetrics("0-stopped", 1, {}, {}, run_id="r"))
        for name in names:
            self.worker(name)
            self.leader(name)
        self.run_until(lambda: set(self.owners().values()) == set(names), 60)
        self.run(90)  # every candidate has looked at the rows twice

    def _note(self, _clock, operation):
        if operation == "Scan":
            self.scans[self.scheduler.current().host.name] += 1

    @property
    def leading(self):
        return self.coordinator.read_lock().owner_name

    def scanning(self, seconds):
        self.scans.clear()
        self.run(seconds)
        return set(self.scans)


def test_the_leader_and_the_two_smallest_ids_scan():
    fleet = Watched()
    followers = sorted(set("abcdef") - {fleet.leading})
    assert fleet.scanning(200) == {fleet.leading, *followers[:2]}
    assert fleet.scans[followers[0]] == pytest.approx(100, abs=10), "five in a failover time"


def test_the_next_two_scan_when_a_watcher_has_stopped():
    fleet = Watched()
    followers = sorted(set("abcdef") - {fleet.leading})
    fleet.kill(followers[0])
    fleet.run(240)
    assert fleet.scanning(30) == {fleet.leading, *followers[1:3]}


def test_a_watcher_acquires_the_lock_of_a_leader_that_stopped():
    fleet = Watched()
    before = fleet.leading
    fleet.kill(before)
    followers = sorted(set("abcdef") - {before})
    fleet.run_until(lambda: before not in fleet.owners().values(), 8 + 2 + 3)
    assert fleet.leading in followers[:2]


def test_the_others_acquire_the_lock_if_no_watcher_does():
    fleet = Watched()
    before = fleet.leading
    followers = sorted(set("abcdef") - {before})
    for name in (before, *followers[:2]):
        fleet.kill(name)
    fleet.run_until(lambda: fleet.leading in followers[2:], 15)
    fleet.run_until(lambda: set(fleet.owners().values()) == set(followers[2:]), 30)


def test_a_released_lock_is_free_for_everybody_after_a_moment():
    fleet = LeaderFleet(shards=1)
    fleet.worker("a")
    fleet.leader("sensor")
    fleet.run_until(lambda: set(fleet.owners().values()) == {"a"}, 30)


def test_an_error_is_an_event_and_the_next_look_tries_again():
    fleet = Watched(names="ab")
    (watcher,) = {"a", "b"} - {fleet.leading}
    host = fleet.hosts[watcher]

    def fail(_clock, operation):
        if operation == "Scan" and fleet.scheduler.current().host is host:
            raise UnavailableError("timed out", operation="Scan")

    fleet.slow_calls = fail
    fleet.run(10)
    troubles = [event for _, name, event in fleet.events if name == watcher]
    assert AwsTrouble("scan of a standby leader", "timed out") in troubles
