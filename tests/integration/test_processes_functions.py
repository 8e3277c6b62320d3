"""A function as the sink, called by real workers that are killed, stopped and started.

Each record comes at least once. Stops and moves of leases repeat nothing. A kill repeats at most
the records of the last call of the killed process.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kcl_pipeline.local import EmbeddedAws
from tests.support.fleet_processes import CLOCK, Fleet, Publisher, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(900)]

PIPELINE = "functions:events"
NAMES = ("a-1", "a-2", "a-3")
ROUNDS = 4


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with EmbeddedAws() as aws:
        fleet = Fleet(aws, tmp_path)
        fleet.kinesis.create_stream(StreamName="events", ShardCount=6)
        try:
            yield fleet
        finally:
            fleet.close()


class Calls:
    """The calls of the function, in their order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "calls"
        self._read: dict[Path, dict[str, Any]] = {}

    def all(self) -> list[dict[str, Any]]:
        for path in self._folder.glob("*.json"):
            if path not in self._read:
                self._read[path] = json.loads(path.read_text())
        return sorted(self._read.values(), key=lambda one: one["at"])

    def counts(self) -> Counter[str]:
        return Counter(number for call in self.all() for number in call["ids"])

    def of(self, pids: set[int]) -> set[str]:
        """The ids of the last call of each of these processes."""
        last = {call["pid"]: call["ids"] for call in self.all() if call["pid"] in pids}
        return {number for ids in last.values() for number in ids}


def shared_by(fleet: Fleet, names: set[str]) -> None:
    wait_until(lambda: fleet.owners().keys() == names, 120, f"{names} to share all leases")


def goes_on(calls: Calls) -> None:
    before = len(calls.counts())
    wait_until(lambda: len(calls.counts()) > before + 500, 120, "the next records")


def test_stops_and_moves_repeat_nothing_and_kills_little(fleet: Fleet, tmp_path: Path) -> None:
    calls, publisher = Calls(tmp_path), Publisher(fleet, per_second=300)
    for name in NAMES[:2]:
        fleet.start(name, PIPELINE)
    publisher.start()
    shared_by(fleet, set(NAMES[:2]))
    goes_on(calls)

    for _ in range(ROUNDS):  # leases move to the third worker by a handoff, and back by its stop
        fleet.start(NAMES[2], PIPELINE)
        shared_by(fleet, set(NAMES))
        goes_on(calls)
        assert fleet.end(NAMES[2]) == 0, fleet.logs()
        shared_by(fleet, set(NAMES[:2]))
        goes_on(calls)
    repeated = [number for number, count in calls.counts().items() if count > 1]
    assert repeated == [], "a stop or a move repeats nothing"

    killed: set[int] = set()
    for turn in range(ROUNDS):
        name = NAMES[turn % 2]
        killed.add(fleet.workers[name].pid)
        fleet.end(name, signal.SIGKILL)
        goes_on(calls)
        fleet.start(name, PIPELINE)
        shared_by(fleet, set(NAMES[:2]))
        goes_on(calls)

    publisher.stop.set()
    publisher.join(30)
    assert publisher.error is None
    wait_until(lambda: len(calls.counts()) >= len(publisher.ids), 120, "all records")
    counts = calls.counts()
    assert set(counts) == set(publisher.ids), "a record is missing"
    repeated = [number for number, count in counts.items() if count > 1]
    print(f"{len(counts)} records, {len(repeated)} of them came again after {ROUNDS} kills")
    assert set(repeated) <= calls.of(killed), "only the last call of a killed process repeats"
    began = CLOCK.monotonic()
    for name in NAMES[:2]:
        assert fleet.end(name) == 0
    assert CLOCK.monotonic() - began < 60
