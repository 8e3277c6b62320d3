"""Checks after the storm: steady leases (L3), a short graceful stop (L4), no leader (L9).

Under a steady load no lease may move back and forth. A graceful stop must be short and repeat no
record. When nobody can lead and a worker is killed, the others take its leases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Final

from verification.simulation.checks.leases import Moved
from verification.simulation.environment.calls import LOCK_WRITES
from verification.simulation.incidents.hosts import SENSOR, STRATEGIES
from verification.simulation.scenario import FAILOVER_SECONDS, LOCK_SECONDS
from verification.simulation.world import World

CONVERGE_SECONDS: Final = 12.0
STEADY_SECONDS: Final = 6.0
STOP_SECONDS: Final = 5.0
NO_LEADER_SECONDS: Final = 8 * FAILOVER_SECONDS
"""A worker of a leaderless application scans, and scans again after twice the failover time."""
EXPIRED_SECONDS: Final = LOCK_SECONDS + 2 * FAILOVER_SECONDS
"""In another application nobody takes the leases. After this time they and the lock have expired,
and a longer wait changes nothing.
"""
_PERIOD: Final = 0.2


def rehearse(
    world: World,
    unowned: Callable[[], list[str]],
    violations: list[str],
) -> None:
    """Run the checks as the body of a task; append what fails to `violations`."""
    _without_leader(world, unowned, violations)
    world.note("-- steady load")
    begin = len(world.checks.moves)
    _load(world, CONVERGE_SECONDS)
    world.note("-- nothing may move again")
    settled = len(world.checks.moves)
    _load(world, STEADY_SECONDS)
    again = back_and_forth(world.checks.moves[begin:], settled - begin, _shared_ids(world))
    if again:
        moved = ", ".join(f"{move.lease_key} at {move.at:.1f} s" for move in again)
        violations.append(f"L3: under a steady load these leases went back and forth: {moved}")
    _stop_one(world, unowned, violations)


def _without_leader(world: World, unowned: Callable[[], list[str]], violations: list[str]) -> None:
    """Kill a worker while nobody can lead; then let somebody lead again.

    In a leaderless application the others take its leases meanwhile; in another one, a leader
    assigns them afterwards.
    """
    at_work = [m for m in world.workers_at_work() if m.mode == "continuous"]
    if len({m.worker_id for m in at_work}) < 2:  # noqa: PLR2004 (somebody has to be left)
        return
    chosen = world.rng.choice(at_work)
    world.note(f"-- nobody can lead, and {chosen.host.name} is killed")
    world.weather.down_sites.update(LOCK_WRITES)
    chosen.host.crash()
    del world.machines[chosen.name]
    outage = NO_LEADER_SECONDS if world.scenario.leaderless else EXPIRED_SECONDS
    until = world.scheduler.now + outage
    while world.scheduler.now < until and unowned():
        _load(world, _PERIOD)
    left = unowned()
    if left and world.scenario.leaderless:
        violations.append(f"L9: {NO_LEADER_SECONDS:.0f} s without a leader: {'; '.join(left)}")
    world.note("-- somebody can lead again")
    world.weather.down_sites.clear()
    _load(world, CONVERGE_SECONDS)
    # A handoff that balances the load may be under way at this instant; it has to end.
    until = world.scheduler.now + FAILOVER_SECONDS
    while world.scheduler.now < until and unowned():
        _load(world, _PERIOD)
    if left := unowned():
        violations.append(f"L9: {CONVERGE_SECONDS:.0f} s after that: {'; '.join(left)}")


def back_and_forth(moves: Sequence[Moved], settled: int, shared_ids: Container[str]) -> list[Moved]:
    """Return moves from number `settled` on, of leases that had moved before that number.

    Moves from or to a worker id that two processes share are excluded. The two reject each other's
    batches and read them again, so the load of their leases is not steady.
    """
    before = {move.lease_key for move in moves[:settled]}
    return [
        move
        for move in moves[settled:]
        if move.lease_key in before
        and move.before not in shared_ids
        and move.after not in shared_ids
    ]


def _shared_ids(world: World) -> frozenset[str]:
    """The worker ids that two running processes share."""
    counts = Counter(machine.worker_id for machine in world.workers_at_work())
    return frozenset(worker_id for worker_id, count in counts.items() if count > 1)


def _replace_sensor(world: World) -> None:
    """Reload the code server: the leader loses its state and leads again at once."""
    world.note("-- the leader is replaced")
    world.machines[SENSOR].stop.set()
    world.start(SENSOR, strategy=STRATEGIES[0], is_worker=False)
    world.scheduler.pause(world.rng.uniform(0.0, 2.5))


def _load(world: World, seconds: float) -> None:
    until = world.scheduler.now + seconds
    while world.scheduler.now < until:
        world.producer.publish_evenly()
        world.scheduler.pause(_PERIOD)


def _stop_one(
    world: World,
    unowned: Callable[[], list[str]],
    violations: list[str],
) -> None:
    at_work = [m for m in world.workers_at_work() if not m.quirky and m.mode == "continuous"]
    twice = {m.worker_id for m in at_work if sum(o.worker_id == m.worker_id for o in at_work) > 1}
    if len(at_work) < 2 or twice:  # noqa: PLR2004 (somebody has to be left)
        return
    chosen = world.rng.choice(at_work)
    if world.rng.choice((True, False)):
        leading = [m for m in at_work if m.worker_id == world.lock_watch.owner_name]
        if leading:
            chosen = leading[0]
        else:
            _replace_sensor(world)
    world.note(f"-- {chosen.host.name} is asked to stop")
    chosen.stop.set()
    until = world.scheduler.now + STOP_SECONDS
    while world.scheduler.now < until and unowned():
        world.scheduler.pause(0.1)
    if left := unowned():
        violations.append(f"L4: {STOP_SECONDS:.0f} s after a graceful stop: {'; '.join(left)}")
