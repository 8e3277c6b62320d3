"""The run of one seed, from start to end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from verification.simulation.checks.leases import BrokenInvariantError
from verification.simulation.checks.rehearsal import rehearse
from verification.simulation.environment.scheduler import TimeIsUpError
from verification.simulation.incidents.storm import Storm, StormOptions
from verification.simulation.scenario import Scenario, scenario_of
from verification.simulation.world import World

REHEARSAL_SECONDS: Final = 120.0
_LOOK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one seed.

    Attributes:
        violations: Broken invariants; empty if all hold.
        faults: Counts by (call site, fault).
        settled_seconds: Time after the storm until everything was committed and owned.
        incidents: Number of planned incidents.
    """

    seed: int
    scenario: Scenario
    violations: tuple[str, ...]
    faults: Counter[tuple[str, str]]
    lines: tuple[tuple[float, str], ...]
    published: int
    committed: int
    steps: int
    settled_seconds: float
    incidents: int

    def timeline(self, last: int = 120) -> str:
        """The last lines of the timeline, with virtual time, then the violations."""
        shown = [f"{at:9.3f}  {text}" for at, text in self.lines[-last:]]
        return "\n".join(
            [
                f"seed {self.seed}: {self.scenario}",
                *shown,
                *(f"VIOLATION {text}" for text in self.violations),
            ]
        )


def simulate(seed: int, options: StormOptions | None = None) -> Outcome:
    """Run one seed.

    The same seed and options give the same outcome, to the last line of the timeline.

    Raises:
        KeyboardInterrupt: It was interrupted.
    """
    options = options or StormOptions()
    scenario = scenario_of(seed)
    world = World(seed, scenario)
    if not options.steer:
        world.weather.steered = None
    storm = Storm(world, options)
    violations: list[str] = []
    settled = 0.0
    storm.begin()
    world.ground.spawn("stillness", world.stillness.run)
    driver = world.ground.spawn("storm", storm.drive)
    try:
        world.scheduler.run(lambda: driver.done, seconds=options.storm_seconds * 4)
        calm_at = world.scheduler.now
        if world.scheduler.broken is None and _settles(world, options.settle_seconds):
            settled = world.scheduler.now - calm_at
            if scenario.rehearsal:
                _rehearsed(world, options, violations)
        elif world.scheduler.broken is None:
            violations += [
                f"{options.settle_seconds:.0f} s after the storm: {text}"
                for text in unsettled(world)
            ]
    except TimeIsUpError as error:
        violations.append(f"L6: {error}")
    violations += _broken(world)
    world.scheduler.close()
    checks = world.checks
    return Outcome(
        seed,
        scenario,
        tuple(dict.fromkeys(violations)),
        world.weather.counts,
        tuple(world.lines),
        len(checks.ledger.events),
        len(checks.committed),
        world.scheduler.steps,
        settled,
        len(storm.plan),
    )


def _settles(world: World, seconds: float) -> bool:
    """Run until the fleet is settled; it is checked ten times a second."""
    next_look = 0.0

    def done() -> bool:
        nonlocal next_look
        if world.scheduler.now < next_look:
            return False
        next_look = world.scheduler.now + _LOOK_SECONDS
        return not unsettled(world)

    return world.scheduler.run(done, seconds=seconds)


def _rehearsed(world: World, options: StormOptions, violations: list[str]) -> None:
    done = world.ground.spawn(
        "rehearsal",
        lambda: rehearse(world, lambda: _unowned(world), violations),
    )
    if (
        not world.scheduler.run(lambda: done.done, seconds=REHEARSAL_SECONDS)
        and world.scheduler.broken is None
    ):
        violations.append("L6: the rehearsal did not end")
    elif world.scheduler.broken is None and not _settles(world, options.settle_seconds):
        violations += [
            f"L4: {options.settle_seconds:.0f} s after a graceful stop: {text}"
            for text in unsettled(world)
        ]


def _broken(world: World) -> list[str]:
    """Errors that ended tasks: broken invariants, and errors that no worker may end with.

    Raises:
        KeyboardInterrupt: The run was interrupted while a task ran.
    """
    for task in world.scheduler.tasks:
        if isinstance(task.error, KeyboardInterrupt):
            raise task.error
    found = [
        str(t.error) for t in world.scheduler.tasks if isinstance(t.error, BrokenInvariantError)
    ]
    found += [
        f"{t.host.name}/{t.name} died of {type(t.error).__name__}: {t.error}"
        for t in world.scheduler.tasks
        if t.error and not isinstance(t.error, BrokenInvariantError)
    ]
    return found + world.failures


def unsettled(world: World) -> list[str]:
    """What is not yet settled after the storm.

    These are events not in the table (L1), leases without a running owner, open handoffs (L2), gaps
    in hash-range coverage (S7), drains, and streams of which nobody says that they are gone (L8).
    """
    found = [f"L2: {text}" for text in _unowned(world)]
    found += ["L2: a seek does not come to its end"] * bool(world.seeks)
    if found:
        return found
    missing = sorted(world.checks.missing())
    found = [f"L1: {len(missing)} events are not in the table: {missing[:3]}"] if missing else []
    found += [f"S7: {text}" for text in world.checks.uncovered()]
    found += [f"L8: {text}" for text in _unreported(world)]
    draining = [
        m.host.name
        for m in world.machines.values()
        if m.mode == "drain" and not m.host.crashed and not m.stop.is_set()
    ]
    return found + [f"L2: {name} does not come to its end" for name in draining]


def _unreported(world: World) -> list[str]:
    """Streams that were deleted: missing ones without an event, and leases of replaced ones."""
    streams = world.streams
    arns = {streams.arn_of(ref) for ref in world.configured if ref not in streams.current}
    found = [f"nothing says that {arn} is missing" for arn in sorted(arns - world.unavailable)]
    former = [
        row.unique_key
        for row in world.checks.rows()
        if streams.is_replaced(world.checks.generation_of(row))
    ]
    return found + [f"the leases {former} of former streams are kept"] * bool(former)


def _unowned(world: World) -> list[str]:
    living = {m.worker_id for m in world.workers_at_work() if m.mode == "continuous"}
    return [
        f"{lease.lease_key} is owned by {lease.owner}, drained by {lease.checkpoint_owner}"
        for lease in world.checks.rows()
        if not lease.ended and (lease.owner not in living or lease.in_handoff)
    ]
