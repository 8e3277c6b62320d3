"""Say the results of operations in sentences, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kcl_pipeline.text import counted

if TYPE_CHECKING:  # the help of the command line loads this module
    from kcl_pipeline.control.moving import Drained, Moved
    from kcl_pipeline.control.pausing import Paused
    from kcl_pipeline.control.retire.parts import Part
    from kcl_pipeline.control.retire.run import Retired, RetirePlan
    from kcl_pipeline.control.seek.plan import PositionChange
    from kcl_pipeline.control.seek.run import SeekPlan, Sought
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


def moved(done: Moved, *, dry_run: bool) -> str:
    """What a move has achieved."""
    way = "by a handoff" if done.graceful else "at once"
    route = f"{done.lease_key} from {done.from_worker or 'no owner'} to {done.to_worker}"
    if dry_run:
        return f"dry run: would move {route} {way}"
    return f"moved {route}" if done.done else f"moving {route} {way}; it is not complete yet"


def balanced(*, taken: bool) -> str:
    """Whether a leader has balanced."""
    if taken:
        return (
            "the leader has balanced the leases; `kcl-pipeline leases` shows moves that still run"
        )
    return (
        "no leader has taken the request yet; it stays stored. A leader of the Java KCL does not "
        "take it: see `kcl-pipeline leader`"
    )


def change(one: PositionChange) -> str:
    """One change of a position."""
    before = one.seek.lease.checkpoint if one.seek.exists else "no row"
    return f"{one.lease_key}: from {before} to {one.seek.position}; {one.note}"


def seek_plan(found: SeekPlan) -> list[str]:
    """What a seek would change, and what prevents it."""
    lines = [f"dry run: {counted(len(found.changes), 'position')} would change"]
    if found.held:
        owners = ", ".join(sorted(set(found.held.values())))
        lines.append(f"{counted(len(found.held), 'lease')} held by {owners}: a pause is needed")
    return lines


def sought(done: Sought) -> list[str]:
    """What a seek has changed."""
    lines = [f"{counted(len(done.written), 'position')} changed"]
    if done.refused:
        lines.append(f"not changed, because their rows changed: {', '.join(done.refused)}")
    if done.is_paused:
        lines.append("the application is still paused")
    return lines


def plan_as_dict(found: SeekPlan) -> dict[str, Any]:
    """The plan of a seek for JSON output."""
    return {
        "dry_run": True,
        "changes": [change_as_dict(one) for one in found.changes],
        "held": dict(found.held),
    }


def sought_as_dict(done: Sought) -> dict[str, Any]:
    """The result of a seek for JSON output."""
    return {
        "dry_run": False,
        "changes": [change_as_dict(one) for one in done.written],
        "refused": list(done.refused),
        "is_paused": done.is_paused,
    }


def change_as_dict(one: PositionChange) -> dict[str, Any]:
    """One change for JSON output."""
    return {
        "lease_key": one.lease_key,
        "before": str(one.seek.lease.checkpoint) if one.seek.exists else None,
        "after": str(one.seek.position),
        "timestamp_millis": one.seek.initial_millis,
        "note": one.note,
    }


def retire_plan(found: RetirePlan) -> list[str]:
    """What a retirement would delete, and what stays."""
    lines = [f"would delete {_part(one)}" for one in found.parts.all]
    lines += [f"cannot look at {one.name}: {one.reason}" for one in found.parts.problems]
    lines += [f"stays: {one}" for one in found.parts.stays]
    if not lines:
        lines = ["nothing is left of the application"]
    if found.observed_seconds:
        lines.append(
            f"before that, the rows of {', '.join(found.named)} must not change for "
            f"{found.observed_seconds:.0f} s"
        )
    return lines


def retired(done: Retired) -> list[str]:
    """What a retirement has deleted."""
    lines = []
    for one in done.results:
        reason = f": {one.reason}" if one.reason else ""
        lines.append(f"{one.outcome} {_part(one.part)}{reason}")
    lines += [f"failed {one.name}: {one.reason}" for one in done.parts.problems]
    lines += [f"stays: {one}" for one in done.parts.stays]
    if not done.results and not done.parts.problems:
        lines.insert(0, "nothing was left to delete")
    if done.is_paused:
        lines.append("the application is still paused: retire it again to complete, or resume it")
    return lines


def retire_plan_as_dict(found: RetirePlan) -> dict[str, Any]:
    """The plan of a retirement for JSON output."""
    return {
        "dry_run": True,
        "parts": [_part_as_dict(one) for one in found.parts.all],
        "problems": [asdict(one) for one in found.parts.problems],
        "stays": list(found.parts.stays),
        "named": list(found.named),
        "observed_seconds": found.observed_seconds,
    }


def retired_as_dict(done: Retired) -> dict[str, Any]:
    """The result of a retirement for JSON output."""
    return {
        "dry_run": False,
        "parts": [
            _part_as_dict(one.part) | {"outcome": one.outcome, "reason": one.reason}
            for one in done.results
        ],
        "problems": [asdict(one) for one in done.parts.problems],
        "stays": list(done.parts.stays),
        "is_paused": done.is_paused,
        "is_complete": done.is_complete,
    }


def _part(part: Part) -> str:
    what = {
        "table": "the table",
        "rows": "the rows of the application in the table",
        "announcements": "the announcements of the table",
        "consumer": "the fan-out consumer",
    }[part.kind]
    return f"{what} {part.name} ({part.detail})"


def _part_as_dict(part: Part) -> dict[str, Any]:
    return {"kind": part.kind, "name": part.name, "detail": part.detail}
