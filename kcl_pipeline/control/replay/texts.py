"""Say the results of a replay in sentences, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kcl_pipeline.text import counted
from kcl_pipeline.worker.summary import StopReason

if TYPE_CHECKING:
    from kcl_pipeline.control.replay.run import Replayed, ReplayPlan


def plan(found: ReplayPlan) -> list[str]:
    """What a replay reads and writes."""
    record = found.record
    begin, end = (one.isoformat(timespec="milliseconds") for one in (record.begin, record.end))
    begun = "continues" if found.is_continued else "begins"
    if record.into is not None:
        where = f"into the side table {record.into}; the table of the pipeline is not written"
    elif found.table is None:
        where = "by the function of the pipeline, at least once; its rows are repeated"
    else:
        where = f"into {found.table}, the table of the pipeline, where its rows are repeated"
    return [
        f"the replay {found.replay_id} {begun}: application {found.name}",
        f"records of {', '.join(found.streams)} that arrived from {begin} to {end} (exclusive)",
        f"each record lands once more {where}",
    ]


def dry_run(found: ReplayPlan, shards: Mapping[str, int]) -> list[str]:
    """What a replay would do."""
    counts = "; ".join(
        f"{name}: {counted(number, 'shard')} at the begin of the range"
        for name, number in shards.items()
    )
    return [*plan(found), counts, "dry run: nothing was written"]


def replayed(done: Replayed) -> list[str]:
    """What a run of a replay has achieved."""
    name, total = done.plan.replay_id, done.total
    lines = []
    if total is not None:
        lines.append(
            f"{total.records:,} records, {total.rows_written:,} rows and {total.dead_letters:,} "
            "dead letters in this run"
        )
    if done.is_complete:
        lines.append(f"the replay {name} is complete; its DynamoDB tables are deleted")
        return lines
    why = done.error or ("it was stopped" if done.reason is StopReason.STOPPED else done.reason)
    lines.append(f"the replay {name} is not complete: {why}")
    lines.append(f"continue it with the id {name}; nothing lands twice")
    return lines


def plan_as_dict(found: ReplayPlan) -> dict[str, Any]:
    """A replay for JSON output."""
    record = found.record
    return {
        "replay_id": found.replay_id,
        "application": found.name,
        "streams": list(found.streams),
        "from": record.begin.isoformat(timespec="milliseconds"),
        "to": record.end.isoformat(timespec="milliseconds"),
        "into": record.into,
        "in_place": record.into is None,
        "is_continued": found.is_continued,
    }


def dry_run_as_dict(found: ReplayPlan, shards: Mapping[str, int]) -> dict[str, Any]:
    """A dry run for JSON output."""
    return {"dry_run": True, **plan_as_dict(found), "shards": dict(shards)}


def replayed_as_dict(done: Replayed) -> dict[str, Any]:
    """The result of a run for JSON output."""
    counters = ("records", "rows_written", "dead_letters", "batches", "bytes", "seconds")
    total = {} if done.total is None else asdict(done.total)
    return {
        "dry_run": False,
        **plan_as_dict(done.plan),
        "reason": str(done.reason),
        "is_complete": done.is_complete,
        "error": done.error,
        "run": {name: total.get(name) for name in counters},
    }
