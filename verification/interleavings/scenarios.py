"""The scenarios of the interleaving explorer, and a command that explores them.

python -m verification.interleavings.scenarios [--deeper N] [NAME ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.testing.sink import SinkFault
from verification.interleavings.explorer import Explored, explore
from verification.interleavings.lineage import LineageBench, LineageScenario
from verification.interleavings.tables import JAVA, TableBench, TableScenario
from verification.interleavings.world import Bench, Scenario, Worker

_MOVE: Final = (("s0", "w2"),)
_SECOND: Final = Worker("w2", size=2)


def scenarios() -> Iterator[Scenario | LineageScenario]:
    """Return all scenarios.

    Every schedule can stop at any point, so each scenario includes every crash point of every
    worker.
    """
    yield Scenario("one worker", (Worker("w1"),), preemptions=1, records=3)
    yield Scenario("a paused writer", (Worker("w1"), _SECOND), _MOVE, preemptions=3)
    yield Scenario(
        "a paused writer with larger batches", (Worker("w1", size=2), Worker("w2")), _MOVE
    )
    yield Scenario(
        "two paused writers", (Worker("w1"), _SECOND, Worker("w3")), (("s0", "w2"), ("s0", "w3"))
    )
    yield Scenario(
        "there and back",
        (Worker("w1"), _SECOND, Worker("w1 again", worker_id="w1")),
        (("s0", "w2"), ("s0", "w1")),
        preemptions=1,
    )
    yield Scenario(
        "a shared worker id",
        (Worker("w1"), Worker("w1 second process", size=2, worker_id="w1")),
        preemptions=3,
    )
    yield Scenario(
        "a shared worker id, with renewals",
        (Worker("w1", renews=1), Worker("w1 second process", size=2, worker_id="w1", renews=1)),
        preemptions=1,
    )
    yield Scenario(
        "a shared worker id and a taker",
        (Worker("w1"), Worker("w1 second process", size=2, worker_id="w1"), _SECOND),
        _MOVE,
    )
    yield Scenario(
        "a batch of two leases loses one", (Worker("w1"), _SECOND), _MOVE, leases=("s0", "s1")
    )
    yield from _sink_faults()
    yield from _lost_answers()
    yield from _lineage()
    yield from _tables()


def _sink_faults() -> Iterator[Scenario]:
    for fault in SinkFault:
        for number in (1, 2):
            first = Worker("w1", sink_faults={("commit", number): fault})
            yield Scenario(f"commit {number} of the old owner: {fault}", (first, _SECOND), _MOVE)
        taker = replace(_SECOND, size=1, sink_faults={("commit", 1): fault})
        yield Scenario(f"commit of the taker: {fault}", (Worker("w1"), taker), _MOVE, preemptions=1)
    yield Scenario(
        "positions of the taker: fail",
        (Worker("w1"), replace(_SECOND, sink_faults={("positions", 1): SinkFault.FAIL})),
        _MOVE,
        preemptions=1,
    )


def _lost_answers() -> Iterator[Scenario]:
    for kind in ("before", "after", "throttled"):
        for number in (1, 2, 3):
            first = Worker("w1", lost_answers={number: kind})
            yield Scenario(
                f"write {number} of the old owner: {kind}",
                (first, _SECOND),
                _MOVE,
                preemptions=2 if kind == "after" else 1,
            )
        yield Scenario(
            f"write 1 of the taker: {kind}",
            (Worker("w1"), replace(_SECOND, size=1, lost_answers={1: kind})),
            _MOVE,
            preemptions=1,
        )
    first, second = (
        Worker("w1", lost_answers={1: "after"}, renews=1),
        Worker("w1 second process", size=2, worker_id="w1"),
    )
    yield Scenario("a lost answer with a shared worker id", (first, second))


def _lineage() -> Iterator[LineageScenario]:
    """Scenarios that create and delete lease rows (see `verification.interleavings.lineage`)."""
    first, second = ("w1", "w1"), ("w2", "w2")
    shared = LineageScenario(
        "a shared worker id across the end of a shard",
        (first, ("w1 second process", "w1")),
        preemptions=1,
        child_owners=("w1",),
        born=True,
    )
    yield shared
    yield replace(shared, name=f"{shared.name}, and a cleanup", cleans=2)
    yield LineageScenario(
        "an end of a shard without an answer, and a stop",
        (first,),
        child_owners=("w1",),
        born=True,
        lost_answers={2: "after"},
        passes=2,
    )
    yield LineageScenario(
        "the deleted row of a parent",
        (first, second),
        preemptions=1,
        child_owners=("w2",),
        parent_owners=("w2",),
        deletes=True,
    )
    yield LineageScenario(
        "a former owner of a child whose parent was deleted",
        (first, second),
        preemptions=1,
        child_owners=("w1", "w2"),
        ended=True,
        cleans=1,
        log_seen=False,
    )
    java = LineageScenario(
        "a Java worker finishes a shard, and its lease goes",
        (second,),
        preemptions=1,
        child_owners=("w2", "java"),
        java=True,
        log_seen=False,
    )
    yield java
    yield replace(java, name=f"{java.name}, at LATEST", position="LATEST")


def _tables() -> Iterator[TableScenario]:
    """Scenarios with a Java worker, or a table that somebody touches."""
    first, second = Worker("w1"), _SECOND
    back = (("s0", JAVA), ("s0", "w2"))
    yield TableScenario("Java between two workers", (first, second), back, preemptions=1, records=3)
    yield TableScenario("Java in between, larger batches", (replace(first, size=2), second), back)
    for accident in ("replaced", "put back"):
        yield TableScenario(
            f"a table that is {accident}",
            (first, second),
            _MOVE,
            records=3,
            preemptions=1,
            accident=accident,
        )
        yield TableScenario(
            f"Java, and a table that is {accident}",
            (first, second),
            back,
            records=3,
            preemptions=1,
            accident=accident,
        )


def explored(scenario: Scenario | LineageScenario, *, deeper: int = 0) -> Explored:
    """Explore every schedule of a scenario, with `deeper` additional preemptions.

    Raises `explorer.Violation`.
    """
    preemptions = scenario.preemptions + deeper
    if isinstance(scenario, TableScenario):
        return explore(lambda: TableBench(scenario), preemptions=preemptions)
    if isinstance(scenario, LineageScenario):
        return explore(lambda: LineageBench(scenario), preemptions=preemptions)
    return explore(lambda: Bench(scenario), preemptions=preemptions)


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore the scenarios; print one line for each and the sum."""
    parser = argparse.ArgumentParser(
        description="Every interleaving of the commit protocol's I/O calls, by scenario"
    )
    parser.add_argument("names", nargs="*", help="only scenarios whose name contains one of these")
    parser.add_argument("--deeper", type=int, default=0, help="more preemptions than in the tests")
    options = parser.parse_args(arguments)
    clock, schedules, steps = SystemClock(), 0, 0
    for scenario in scenarios():
        if options.names and not any(name in scenario.name for name in options.names):
            continue
        began = clock.monotonic()
        found = explored(scenario, deeper=options.deeper)
        schedules, steps = schedules + found.schedules, steps + found.steps
        sys.stdout.write(
            f"{found.schedules:8} schedules {found.steps:9} steps "
            f"{clock.monotonic() - began:7.1f} s  {scenario.name}\n"
        )
        sys.stdout.flush()
    sys.stdout.write(f"{schedules:8} schedules {steps:9} steps, no violation\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
