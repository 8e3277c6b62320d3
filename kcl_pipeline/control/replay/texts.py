"""Say the results of a replay in sentences, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kcl_pipeline.leases.attributes import MAX_MILLIS
from kcl_pipeline.text import counted
from kcl_pipeline.worker.status import StopReason

if TYPE_CHECKING:
    from kcl_pipeline.control.replay.letters import LettersPlan, LettersReplayed
    from kcl_pipeline.control.replay.run import Replayed, ReplayPlan

DRY_RUN = "dry run: nothing was written"


def plan(planned: ReplayPlan, *, dry_run: bool = False) -> list[str]:
    """What a replay of a time range reads and writes."""
    record = planned.record
    if record.into is not None:
        where = f"into the side table {record.into}; the table of the pipeline is not written"
    elif planned.table is None:
        where = "by the function of the pipeline, at least once; its rows are repeated"
    else:
        where = f"into {planned.table}, the table of the pipeline, where its rows are repeated"
    begin, end = (one.isoformat(timespec="milliseconds") for one in (record.begin, record.end))
    return [
        f"the replay {planned.replay_id} {_begins(planned, dry_run)}: application {planned.name}",
        f"records of {', '.join(planned.streams)} that arrived from {begin} to {end} (exclusive)",
        f"each record lands once more {where}",
    ]


def letters(planned: LettersPlan, *, dry_run: bool = False) -> list[str]:
    """What a replay of dead letters reads and writes."""
    record, found = planned.record, planned.letters
    begin, end = _times(planned)
    which = "".join(
        f" {word} {time}" for word, time in (("from", begin), ("before", end)) if time is not None
    )
    of = f" of the stream {record.only_stream}" if record.only_stream is not None else ""
    lines = [
        f"the replay {planned.replay_id} {_begins(planned, dry_run)}",
        (
            f"{counted(found.records, 'dead letter')}{of} in {found.root} not marked as "
            f"replayed{', which failed' if which else ''}{which}"
        ),
    ]
    if planned.is_continued:
        lines.append(f"{planned.landed} of {len(planned.chunks)} chunks have landed before")
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
    if found.unreadable:
        lines.append(
            f"{counted(found.unreadable, 'row')} cannot be replayed: a column of the record is "
            f"null, or its position is wrong; one of them has {found.example}"
        )
    return lines


def _begins(planned: ReplayPlan | LettersPlan, dry_run: bool) -> str:
    verb = "continue" if planned.is_continued else "begin"
    return f"would {verb}" if dry_run else f"{verb}s"


def _times(planned: LettersPlan) -> tuple[str | None, str | None]:
    """Return the begin and the end; None where there is no limit."""
    record = planned.record
    begin, end = (one.isoformat(timespec="milliseconds") for one in (record.begin, record.end))
    return begin if record.from_millis else None, end if record.to_millis < MAX_MILLIS else None


def dry_run(planned: ReplayPlan, shards: Mapping[str, int]) -> list[str]:
    """What a replay of a time range would do."""
    counts = "; ".join(
        f"{name}: {counted(number, 'shard')} at the begin of the range"
        for name, number in shards.items()
    )
    return [*plan(planned, dry_run=True), *filter(None, [counts]), DRY_RUN]


def letters_dry_run(planned: LettersPlan) -> list[str]:
    """What a replay of dead letters would do."""
    counts = "; ".join(
        f"{name}: {counted(number, 'shard')} with dead letters"
        for name, number in planned.letters.streams.items()
    )
    return [*letters(planned, dry_run=True), *filter(None, [counts]), DRY_RUN]


def replayed(done: Replayed) -> list[str]:
    """What a run of a replay of a time range has achieved."""
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


def letters_replayed(done: LettersReplayed) -> list[str]:
    """What a run of a replay of dead letters has achieved."""
    name = done.plan.replay_id
    counts = (
        f"{counted(done.records, 'record')} replayed, {counted(done.rows, 'row')} written and "
        f"{counted(done.failed, 'record')} failed again in this run"
    )
    lines = [counts]
    if done.marked is not None:
        lines.append(f"{counted(done.marked, 'dead letter')} marked as replayed")
    if done.is_complete:
        return [*lines, f"the replay {name} is complete"]
    return [
        *lines,
        f"the replay {name} is not complete: {done.error}",
        f"continue it with the same options and the id {name}; nothing lands twice",
    ]


def plan_as_dict(planned: ReplayPlan) -> dict[str, Any]:
    """A replay of a time range for JSON output."""
    record = planned.record
    return {
        "replay_id": planned.replay_id,
        "application": planned.name,
        "streams": list(planned.streams),
        "from": record.begin.isoformat(timespec="milliseconds"),
        "to": record.end.isoformat(timespec="milliseconds"),
        "into": record.into,
        "in_place": record.into is None,
        "is_continued": planned.is_continued,
        "dead_letters": None,
    }


def letters_as_dict(planned: LettersPlan) -> dict[str, Any]:
    """A replay of dead letters for JSON output."""
    record, found = planned.record, planned.letters
    begin, end = _times(planned)
    return {
        "replay_id": planned.replay_id,
        "application": planned.name,
        "streams": list(found.streams),
        "from": begin,
        "to": end,
        "into": record.into,
        "in_place": record.into is None,
        "is_continued": planned.is_continued,
        "dead_letters": {
            "table": found.root,
            "version": found.version,
            "records": found.records,
            "unreadable": found.unreadable,
        },
    }


def dry_run_as_dict(planned: ReplayPlan, shards: Mapping[str, int]) -> dict[str, Any]:
    """A dry run of a replay of a time range for JSON output."""
    return {"dry_run": True, **plan_as_dict(planned), "shards": dict(shards)}


def letters_dry_run_as_dict(planned: LettersPlan) -> dict[str, Any]:
    """A dry run of a replay of dead letters for JSON output."""
    shards = dict(planned.letters.streams)
    return {"dry_run": True, **letters_as_dict(planned), "shards": shards}


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
        "marked": None,
        "run": {name: total.get(name) for name in counters},
    }


def letters_replayed_as_dict(done: LettersReplayed) -> dict[str, Any]:
    """The result of a run for JSON output."""
    counters = {"records": done.records, "rows_written": done.rows, "dead_letters": done.failed}
    return {
        "dry_run": False,
        **letters_as_dict(done.plan),
        "is_complete": done.is_complete,
        "error": done.error,
        "marked": done.marked,
        "run": counters,
    }
