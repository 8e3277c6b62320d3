"""What candidates read: with 500 of them the lease table is read as often as with three."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
)

PERIOD, LEADER_PAUSE, STANDBY_PAUSE = 10, 1, 2
"""Seconds between two reports, and between two cycles of a leader or watcher, and of the others."""


class Candidates:
    """Workers that report and may lead. Those that own leases renew them.

    The candidates run in turn in virtual time. Reads of the leader and of candidates are counted by
    table and operation. `has_rows`: each has reported before it may lead, as a worker does.
    """

    def __init__(self, count, *, has_rows=True):
        self.clock = VirtualClock()
        model = KinesisModel(self.clock)
        model.create_stream("orders", 30)
        self.reads = Counter()
        self.leases = InMemoryLeaseTable(clock=self.clock)
        self.rows = InMemoryWorkerMetricsTable(clock=self.clock)
        self.coordinator = InMemoryCoordinatorStateTable(clock=self.clock)
        settings = ConsumerSettings(application_name="orders-app", streams=("orders",))
        self.cycles = {}
        for number in range(count):
            name = f"w-{number:03}"
            if has_rows:
                self._report(name)
            self.cycles[name] = LeaderCycle(
                settings,
                self.leases.view(before_call=self._counting("leases")),
                self.rows.view(before_call=self._counting("workers")),
                self.coordinator,
                InMemoryKinesis(model),
                self.clock,
                lambda _event: None,
                name,
                rng=Random(name),
            )

    def _report(self, name):
        self.rows.report(WorkerMetrics(name, int(self.clock.wall()), run_id=name))

    def _counting(self, table):
        def count(operation, _key):
            self.reads[table, operation] += 1

        return count

    def run(self, seconds):
        for _ in range(seconds):
            now = round(self.clock.monotonic())
            for number, (name, cycle) in enumerate(self.cycles.items()):
                if (now + number) % PERIOD == 0:
                    self._report(name)
                pause = LEADER_PAUSE if cycle.is_watcher else STANDBY_PAUSE
                if (now + number) % pause == 0:
                    cycle.run_once()
            if now % 3 == 0:
                for lease in self.leases.list_leases().leases:
                    if lease.owner is not None:
                        self.leases.renew(lease)
            self.clock.advance(1)

    def reads_in(self, seconds):
        self.reads.clear()
        self.run(seconds)
        return {key: count / seconds for key, count in self.reads.items()}


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.long)])
def test_many_candidates_read_the_leases_as_often_as_three(count):
    few, many = Candidates(3), Candidates(count)
    at_first = few.reads_in(20), many.reads_in(20)
    few.run(20)
    many.run(20)
    later = few.reads_in(20), many.reads_in(20)
    scans = [one["leases", "Scan"] for one in later]
    assert scans[0] == pytest.approx(2.0, abs=0.2), "one of the leader, one of the two watchers"
    assert scans[1] == pytest.approx(scans[0], abs=0.2)
    assert set(later[1]) == set(later[0]), "no other read of the tables"
    # While nobody knows whose row moves, eight may scan
    assert at_first[1]["leases", "Scan"] <= at_first[0]["leases", "Scan"] + 8 / STANDBY_PAUSE


def test_a_watcher_counts_itself_although_it_has_not_seen_its_row_move():
    """The rows of others appear, and move, before its own."""
    fleet = Candidates(30, has_rows=False)
    fleet.run(30)
    assert fleet.reads_in(20)["leases", "Scan"] == pytest.approx(2.0, abs=0.2)
