"""One seed from beginning to end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kcl_pipeline.testing.scheduler import TimeIsUp
from kcl_pipeline.testing.simulation.checks import BrokenInvariant
from kcl_pipeline.testing.simulation.storm import Storm, StormOptions
from kcl_pipeline.testing.simulation.world import World


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a seed did. `violations` is empty when every invariant held; `faults` counts (call site, fault); `settled_seconds`: how long after the storm
    everything was committed and owned.
    """

    seed: int
    violations: tuple[str, ...]
    faults: Counter[tuple[str, str]]
    lines: tuple[tuple[float, str], ...]
    published: int
    committed: int
    steps: int
    settled_seconds: float

    def timeline(self, last: int = 120) -> str:
        """The last lines of what happened, with virtual time, then the violations."""
        shown = [f"{at:9.3f}  {text}" for at, text in self.lines[-last:]]
        return "\n".join([f"seed {self.seed}", *shown, *(f"VIOLATION {text}" for text in self.violations)])


def simulate(seed: int, options: StormOptions | None = None) -> Outcome:
    """Run one seed. The same seed and options give the same outcome, to the last line of the timeline."""
    options = options or StormOptions()
    world = World(seed)
    storm = Storm(world, options)
    violations: list[str] = []
    settled = 0.0
    storm.begin()
    driver = world.ground.spawn("storm", storm.drive)
    try:
        world.scheduler.run(lambda: driver.done, seconds=options.storm_seconds * 4)
        calm_at = world.scheduler.now
        if world.scheduler.broken is None and world.scheduler.run(lambda: _settled(world), seconds=options.settle_seconds):
            settled = world.scheduler.now - calm_at
        elif world.scheduler.broken is None:
            violations += _stuck(world, options)
    except TimeIsUp as error:
        violations.append(f"L6: {error}")
    violations += _broken(world)
    world.scheduler.close()
    ledger = world.checks.ledger
    return Outcome(
        seed,
        tuple(dict.fromkeys(violations)),
        world.weather.counts,
        tuple(world.lines),
        len(ledger.ids),
        len(world.checks.committed),
        world.scheduler.steps,
        settled,
    )


def _broken(world: World) -> list[str]:
    """What tasks died of: broken invariants, and errors that no worker may die of."""
    found = [str(t.error) for t in world.scheduler.tasks if isinstance(t.error, BrokenInvariant)]
    found += [
        f"{t.host.name}/{t.name} died of {type(t.error).__name__}: {t.error}"
        for t in world.scheduler.tasks
        if t.error and not isinstance(t.error, BrokenInvariant)
    ]
    return found + world.failures


def _settled(world: World) -> bool:
    """L1, L2: everything published is in the table, every unfinished lease has a living owner and no handoff is open."""
    return not world.checks.missing() and not _unowned(world)


def _unowned(world: World) -> list[str]:
    living = {m.worker_id for m in world.machines.values() if m.is_worker and not m.host.crashed and not m.stop.is_set()}
    rows = [lease for lease in (world.checks.lease(key) for key in world.leases.store.rows()) if lease is not None and not lease.ended]
    return [
        f"{lease.lease_key} is owned by {lease.owner}, drained by {lease.checkpoint_owner}" for lease in rows if lease.owner not in living or lease.in_handoff
    ]


def _stuck(world: World, options: StormOptions) -> list[str]:
    missing = sorted(world.checks.missing())
    found = [f"L1: {len(missing)} events are not in the table {options.settle_seconds:.0f} s after the storm: {missing[:3]}"] if missing else []
    return found + [f"L2: {text}" for text in _unowned(world)]
