"""Cases of workers that come, go and hand leases off, and of reshards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .checks import all_held, hand_over, mixed, other
from .fleet import CaseFailedError, InteropFleet


@dataclass(frozen=True, slots=True)
class Found:
    """What a case that passed has found.

    Attributes:
        text: For the reader of the log.
        seconds: The time that the table shows: until the share is held, the handoff is complete,
            the children are held, or all shards are read again.
    """

    text: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        name: Short name.
        title: What happens, as a row of the table.
        run: Runs it.
        repeats: Whether records may be processed again, because a worker is killed before it has
            checkpointed them, or a stream is created again.
    """

    name: str
    title: str
    run: Callable[[InteropFleet], Found]
    repeats: bool = False


def join(fleet: InteropFleet) -> Found:
    """The side that did not start first joins and gets its share."""
    first, second = fleet.application.first, other(fleet.application.first)
    fleet.start(first)
    fleet.wait("leases of the first worker", lambda: all_held(fleet), 240)
    joined = fleet.start(second)
    share = len(fleet.leases()) // 2
    took = fleet.wait("the share", lambda: len(fleet.held_by(second)) >= share, 180)
    return Found(f"{joined}: {share} leases", took)


def join_of_java(fleet: InteropFleet) -> Found:
    """For comparison: under a Java leader, a second Java worker joins instead of ours."""
    mixed(fleet, "java")
    fleet.stop(fleet.of("ours")[0])
    fleet.wait("all leases", lambda: all_held(fleet))
    joined = fleet.start("java")
    share = len(fleet.leases()) // 2

    def has_share() -> bool:
        return sum(one.owner == joined for one in fleet.leases().values()) >= share

    took = fleet.wait("the share", has_share, 240)
    fleet.stop(joined)
    mixed(fleet)
    return Found(f"{joined}: {share} leases", took)


def handoff(giving: str) -> Callable[[InteropFleet], Found]:
    """Return a case: a lease of one side is handed to the other."""

    def run(fleet: InteropFleet) -> Found:
        mixed(fleet)
        began = fleet.clock.monotonic()
        hand_over(fleet, giving)
        return Found("handed off", fleet.clock.monotonic() - began)

    return run


def handoff_with_kill(giving: str) -> Callable[[InteropFleet], Found]:
    """Return a case: the old owner is killed when the handoff was requested."""

    def run(fleet: InteropFleet) -> Found:
        mixed(fleet)
        key = fleet.held_by(giving)[0]
        fleet.hand_off(key, fleet.of(other(giving))[0])
        fleet.kill(fleet.of(giving)[0])
        took = fleet.wait("all leases", lambda: all_held(fleet))
        mixed(fleet)
        return Found("all leases held", took)

    return run


def end(ending: str, by: str, leads: bool) -> Callable[[InteropFleet], Found]:
    """Return a case: the worker of one side, which leads or not, is stopped or killed."""

    def run(fleet: InteropFleet) -> Found:
        leading = ending if leads else other(ending)
        mixed(fleet, None if fleet.application.leaderless else leading)
        worker = fleet.of(ending)[0]
        (fleet.kill if by == "kill" else fleet.stop)(worker)
        took = fleet.wait("all leases", lambda: all_held(fleet), 240)
        probes = fleet.traffic.probe()
        took += fleet.wait("a record of each shard", lambda: fleet.is_delivered(probes))
        if not fleet.application.leaderless and fleet.side(fleet.leader()) == ending:
            raise CaseFailedError(f"{worker} has the lock after its end")
        mixed(fleet)
        return Found("all shards read", took)

    return run


def split(owner: str) -> Callable[[InteropFleet], Found]:
    """Return a case: a shard of one side is split."""

    def run(fleet: InteropFleet) -> Found:
        mixed(fleet)
        stream = fleet.streams[0]
        parent = fleet.held_by(owner)[0]
        found = {
            one["ShardId"]: one["HashKeyRange"]
            for one in fleet.kinesis.list_shards(StreamName=stream)["Shards"]
        }[parent]
        middle = (int(found["StartingHashKey"]) + int(found["EndingHashKey"])) // 2
        fleet.kinesis.split_shard(
            StreamName=stream, ShardToSplit=parent, NewStartingHashKey=str(middle)
        )
        took = fleet.wait("the children", lambda: parent not in fleet.leases() and all_held(fleet))
        return Found("held", took)

    return run


def merge(fleet: InteropFleet) -> Found:
    """Two adjacent shards, one of each side, are merged."""
    mixed(fleet)
    stream = fleet.streams[0]
    left, right = sorted(fleet.traffic.open_shards(stream).items(), key=lambda one: one[1])[:2]
    hand_over(fleet, "java", left[0])
    hand_over(fleet, "ours", right[0])
    if left[0] not in fleet.held_by("ours"):
        raise CaseFailedError("the parents did not stay on different sides")
    fleet.kinesis.merge_shards(
        StreamName=stream, ShardToMerge=left[0], AdjacentShardToMerge=right[0]
    )
    parents = {left[0], right[0]}
    took = fleet.wait("the child", lambda: not parents & fleet.leases().keys() and all_held(fleet))
    return Found("held", took)
