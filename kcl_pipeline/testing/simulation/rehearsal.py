"""After the storm: under a steady load no lease may go to and fro (L3), and a graceful stop must be short and repeat nothing (L4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kcl_pipeline.testing.simulation.world import World

CONVERGE_SECONDS: Final = 12.0
STEADY_SECONDS: Final = 6.0
STOP_SECONDS: Final = 5.0
_PERIOD: Final = 0.2


def rehearse(world: World, unowned: Callable[[], list[str]], violations: list[str]) -> None:
    """The body of a task; what does not hold is added to `violations`."""
    world.note("-- steady load")
    begin = len(world.checks.moves)
    _load(world, CONVERGE_SECONDS)
    world.note("-- nothing may move again")
    settled = len(world.checks.moves)
    _load(world, STEADY_SECONDS)
    before = {key for _, key in world.checks.moves[begin:settled]}
    again = [f"{key} at {at:.1f} s" for at, key in world.checks.moves[settled:] if key in before]
    if again:
        violations.append(f"L3: under a steady load these leases went to and fro: {', '.join(again)}")
    _stop_one(world, unowned, violations)


def _load(world: World, seconds: float) -> None:
    until = world.scheduler.now + seconds
    while world.scheduler.now < until:
        world.producer.publish_evenly()
        world.scheduler.pause(_PERIOD)


def _stop_one(world: World, unowned: Callable[[], list[str]], violations: list[str]) -> None:
    at_work = [m for m in world.workers_at_work() if not m.quirky and m.mode == "continuous"]
    twice = {m.worker_id for m in at_work if sum(o.worker_id == m.worker_id for o in at_work) > 1}
    if len(at_work) < 2 or twice:  # noqa: PLR2004 (somebody has to be left)
        return
    chosen = world.rng.choice(at_work)
    world.note(f"-- {chosen.host.name} is asked to stop")
    chosen.stop.set()
    until = world.scheduler.now + STOP_SECONDS
    while world.scheduler.now < until and unowned():
        world.scheduler.pause(0.1)
    if left := unowned():
        violations.append(f"L4: {STOP_SECONDS:.0f} s after a graceful stop: {'; '.join(left)}")
