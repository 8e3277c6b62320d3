"""What must hold after every case, and the states that a case begins with."""

from __future__ import annotations

from .fleet import SIDES, CaseFailedError, InteropFleet


def other(side: str) -> str:
    """Return the other side."""
    return SIDES[1 - SIDES.index(side)]


def all_held(fleet: InteropFleet) -> bool:
    """Return whether each open shard has a lease with a living owner, and none is in a handoff."""
    shards = {
        shard if len(fleet.streams) == 1 else f"{stream}:{shard}"
        for stream in fleet.streams
        for shard in fleet.traffic.open_shards(stream)
    }
    held = {key for side in SIDES for key in fleet.held_by(side)}
    if len(fleet.streams) > 1:
        held = {key.split(":")[1] + ":" + key.split(":")[3] for key in held}
    return shards <= held


def settle(fleet: InteropFleet) -> None:
    """Wait until no lease is stuck and every record that was sent was processed.

    A probe in each open shard shows that its owner works.

    Raises:
        CaseFailedError: It does not become so.
    """
    fleet.wait("an owner of each lease", lambda: all_held(fleet), 90)
    probes = fleet.traffic.probe()
    fleet.wait("a record of each shard", lambda: fleet.is_delivered(probes), 90)
    before = fleet.traffic.sent.copy()
    try:
        fleet.wait("the records so far", lambda: fleet.is_delivered(before), 60)
    except CaseFailedError:
        missing = sorted(fleet.counted().missing & set(before))
        raise CaseFailedError(
            f"{len(missing)} records were not processed, such as {missing[0]}"
        ) from None


def check_logs(fleet: InteropFleet) -> None:
    """Check that no Java worker has met a row that it cannot read."""
    for name, log in fleet.logs.items():
        if log.unreadable:
            raise CaseFailedError(f"{name} logged: {log.unreadable[0][:300]}")


def mixed(fleet: InteropFleet, leading: str | None = None, **java: str) -> tuple[str, str]:
    """Make the fleet one worker of each side, both with leases.

    Args:
        fleet: The fleet.
        leading: The side that leads; None: any.
        java: Settings of a Java worker that starts here.

    Returns:
        Our worker and the Java worker.
    """
    for side in (fleet.application.first, other(fleet.application.first)):
        if not fleet.of(side):
            fleet.start(side, **(java if side == "java" else {}))
    if leading is not None:
        fleet.wait("a leader", lambda: fleet.leader() is not None)
        if fleet.side(fleet.leader()) != leading:
            fleet.wait("a standby", lambda: all_held(fleet))
            fleet.stop(fleet.of(other(leading))[0])
            fleet.wait("the other leader", lambda: fleet.side(fleet.leader()) == leading)
            fleet.start(other(leading))
    fleet.wait(
        "leases of both workers",
        lambda: all_held(fleet) and all(fleet.held_by(side) for side in SIDES),
    )
    return fleet.of("ours")[0], fleet.of("java")[0]


def hand_over(fleet: InteropFleet, giving: str, lease_key: str | None = None) -> str:
    """Hand a lease of one side to the other; return its key when the new owner has a record."""
    key = lease_key or fleet.held_by(giving)[0]
    taker = fleet.of(other(giving))[0]
    if key in fleet.held_by(other(giving)):
        return key
    fleet.hand_off(key, taker)
    fleet.wait(f"the handoff of {key}", lambda: key in fleet.held_by(other(giving)), 60)
    return key
