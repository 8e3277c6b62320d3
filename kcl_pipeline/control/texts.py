"""Say the results of operations in sentences, and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kcl_pipeline.text import counted

if TYPE_CHECKING:  # the help of the command line loads this module
    from kcl_pipeline.control.draining import Drained
    from kcl_pipeline.control.pausing import Paused
    from kcl_pipeline.control.seek import PositionChange, SeekPlan, Sought
    from kcl_pipeline.leases.application.control import Pause


def paused(done: Paused) -> list[str]:
    """What a pause has achieved."""
    lines = [done.pause.sentence if done.is_new else f"already {done.pause.sentence}"]
    if done.evicted:
        lines.append(f"released {counted(len(done.evicted), 'lease')} of workers that had stopped")
    if done.held:
        names = ", ".join(sorted(set(done.held.values())))
        lines.append(f"{counted(len(done.held), 'lease')} still held by {names}")
    else:
        lines.append("no lease is held by a worker of this package")
    if done.java:
        names = ", ".join(sorted(set(done.java.values())))
        lines.append(
            f"warning: {counted(len(done.java), 'lease')} held by workers of the Java KCL, which "
            f"a pause does not stop: {names}"
        )
    return lines


def resumed(was: Pause | None) -> str:
    """What a resume has changed."""
    return "it was not paused" if was is None else f"resumed; it was {was.sentence}"


def drained(done: Drained, *, dry_run: bool) -> str:
    """What a drain has achieved."""
    leases = counted(len(done.leases), "lease")
    if dry_run:
        return f"dry run: {done.worker_id} would end and give up {leases}"
    if done.ended:
        return f"{done.worker_id} has ended; it had {leases}"
    return f"{done.worker_id} is requested to end; it had {leases}"


def change(changed: PositionChange) -> str:
    """One change of a position."""
    before = changed.seek.lease.checkpoint if changed.seek.exists else "no row"
    return f"{changed.lease_key}: from {before} to {changed.seek.position}; {changed.note}"


def seek_plan(planned: SeekPlan) -> list[str]:
    """What a seek would change, and what prevents it."""
    lines = [f"dry run: {counted(len(planned.changes), 'position')} would change"]
    if planned.held:
        owners = ", ".join(sorted(set(planned.held.values())))
        lines.append(f"{counted(len(planned.held), 'lease')} held by {owners}: a pause is needed")
    return lines


def sought(done: Sought) -> list[str]:
    """What a seek has changed."""
    lines = [f"{counted(len(done.written), 'position')} changed"]
    if done.refused:
        lines.append(f"not changed, because their rows changed: {', '.join(done.refused)}")
    if done.is_paused:
        lines.append("the application is still paused")
    return lines


def plan_as_dict(planned: SeekPlan) -> dict[str, Any]:
    """The plan of a seek for JSON output."""
    return {
        "dry_run": True,
        "changes": [change_as_dict(one) for one in planned.changes],
        "held": dict(planned.held),
    }


def sought_as_dict(done: Sought) -> dict[str, Any]:
    """The result of a seek for JSON output."""
    return {
        "dry_run": False,
        "changes": [change_as_dict(one) for one in done.written],
        "refused": list(done.refused),
        "is_paused": done.is_paused,
    }


def change_as_dict(changed: PositionChange) -> dict[str, Any]:
    """One change for JSON output."""
    return {
        "lease_key": changed.lease_key,
        "before": str(changed.seek.lease.checkpoint) if changed.seek.exists else None,
        "after": str(changed.seek.position),
        "timestamp_millis": changed.seek.initial_millis,
        "note": changed.note,
    }
