"""Say the results of a replay in sentences, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kcl_pipeline.leases.attributes import MAX_MILLIS
from kcl_pipeline.text import counted
from kcl_pipeline.worker.summary import StopReason

if TYPE_CHECKING:
    from kcl_pipeline.control.replay.letters import PlannedLetters
    from kcl_pipeline.control.replay.run import Replayed, ReplayPlan
    from kcl_pipeline.leases.application.replay_record import ReplayRecord


def plan(planned: ReplayPlan, *, dry_run: bool = False) -> list[str]:
    """What a replay reads and writes."""
    record = planned.record
    begun = "continues" if planned.is_continued else "begins"
    if dry_run:
        begun = f"would {begun.removesuffix('s')}"
    if record.into is not None:
        where = f"into the side table {record.into}; the table of the pipeline is not written"
    elif planned.table is None:
        where = "by the function of the pipeline, at least once; its rows are repeated"
    else:
        where = f"into {planned.table}, the table of the pipeline, where its rows are repeated"
    first = f"the replay {planned.replay_id} {begun}: application {planned.name}"
    if planned.letters is not None:
        return [first, *_letters(planned, planned.letters)]
    begin, end = (one.isoformat(timespec="milliseconds") for one in (record.begin, record.end))
    return [
        first,
        f"records of {', '.join(planned.streams)} that arrived from {begin} to {end} (exclusive)",
        f"each record lands once more {where}",
    ]


def _letters(planned: ReplayPlan, letters: PlannedLetters) -> list[str]:
    """What a replay of dead letters reads and writes."""
    record, times = planned.record, _times(planned.record)
    which = "".join(
        f" {word} {time}"
        for word, time in (("from", times[0]), ("before", times[1]))
        if time is not None
    )
    of = f" of the stream {record.only_stream}" if record.only_stream is not None else ""
    lines = [
        (
            f"{counted(letters.records, 'dead letter')}{of} in {letters.table} not marked as "
            f"replayed{', which failed' if which else ''}{which}"
        )
    ]
    if record.into is not None:
        lines.append(
            f"each record lands once in the side table {record.into}; the table of the pipeline is "
            "not written, and no dead letter is marked"
        )
    elif planned.table is None:
        lines.append(
            "the function of the pipeline receives each record at least once; then the dead "
            "letters are marked as replayed"
        )
    else:
        lines.append(
            f"each record lands once in {planned.table}, the table of the pipeline; then the dead "
            "letters are marked as replayed"
        )
    if letters.unreadable:
        lines.append(
            f"{counted(letters.unreadable, 'row')} cannot be replayed: a column of the record is "
            f"null, or its position is wrong; one of them has {letters.example}"
        )
    return lines


def _times(record: ReplayRecord) -> tuple[str | None, str | None]:
    """Return the begin and the end; None where dead letters have no limit."""
    is_of_letters = record.dead_letters is not None
    begin, end = (one.isoformat(timespec="milliseconds") for one in (record.begin, record.end))
    return (
        None if is_of_letters and record.from_millis == 0 else begin,
        None if is_of_letters and record.to_millis == MAX_MILLIS else end,
    )


def dry_run(planned: ReplayPlan, shards: Mapping[str, int]) -> list[str]:
    """What a replay would do."""
    when = "at the begin of the range" if planned.letters is None else "with dead letters"
    counts = "; ".join(
        f"{name}: {counted(number, 'shard')} {when}" for name, number in shards.items()
    )
    return [*plan(planned, dry_run=True), *filter(None, [counts]), "dry run: nothing was written"]


def replayed(done: Replayed) -> list[str]:
    """What a run of a replay has achieved."""
    name, total = done.plan.replay_id, done.total
    lines = []
    if total is not None and done.plan.letters is not None:
        lines.append(
            f"{counted(total.records, 'record')} replayed, {counted(total.rows_written, 'row')} "
            f"written and {counted(total.dead_letters, 'record')} failed again in this run"
        )
    elif total is not None:
        lines.append(
            f"{total.records:,} records, {total.rows_written:,} rows and {total.dead_letters:,} "
            "dead letters in this run"
        )
    if done.marked is not None:
        lines.append(f"{counted(done.marked, 'dead letter')} marked as replayed")
    if done.is_complete:
        lines.append(f"the replay {name} is complete; its DynamoDB tables are deleted")
        return lines
    why = done.error or ("it was stopped" if done.reason is StopReason.STOPPED else done.reason)
    lines.append(f"the replay {name} is not complete: {why}")
    lines.append(f"continue it with the id {name}; nothing lands twice")
    return lines


def plan_as_dict(planned: ReplayPlan) -> dict[str, Any]:
    """A replay for JSON output."""
    record, letters = planned.record, planned.letters
    begin, end = _times(record)
    return {
        "replay_id": planned.replay_id,
        "application": planned.name,
        "streams": list(planned.streams if letters is None else letters.streams),
        "from": begin,
        "to": end,
        "into": record.into,
        "in_place": record.into is None,
        "is_continued": planned.is_continued,
        "dead_letters": None
        if letters is None
        else {
            "table": letters.table,
            "version": record.dead_letters,
            "records": letters.records,
            "unreadable": letters.unreadable,
        },
    }


def dry_run_as_dict(planned: ReplayPlan, shards: Mapping[str, int]) -> dict[str, Any]:
    """A dry run for JSON output."""
    return {"dry_run": True, **plan_as_dict(planned), "shards": dict(shards)}


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
        "marked": done.marked,
        "run": {name: total.get(name) for name in counters},
    }
