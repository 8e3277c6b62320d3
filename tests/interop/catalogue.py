"""The table of cases, in the order in which they run."""

from __future__ import annotations

from . import cases_layouts as layouts
from . import cases_records as records
from .cases import Case, end, handoff, handoff_with_kill, join, join_of_java, merge, split
from .fleet import SIDES

NAMES = {"ours": "our worker", "java": "the Java worker"}

CASES = (
    Case("join", "the second side joins and gets its share", join),
    Case("join-of-java", "for comparison: a second Java worker joins instead", join_of_java),
    Case("stays", "Java, set to move the application, does not while ours runs", layouts.stays),
    *(Case(f"handoff-{side}", f"handoff by {NAMES[side]}", handoff(side)) for side in SIDES),
    *(Case(f"split-{side}", f"split of a shard of {NAMES[side]}", split(side)) for side in SIDES),
    Case("merge", "merge of two shards, one of each side", merge),
    Case("foreign", "unknown attributes survive", records.foreign),
    *(
        Case(
            f"handoff-kill-{side}",
            f"handoff by {NAMES[side]}, which is killed in its middle",
            handoff_with_kill(side),
            repeats=True,
        )
        for side in SIDES
    ),
    Case(
        "aggregate-java",
        "KPL aggregate, begun by Java, continued by ours",
        records.aggregate_from_java,
        repeats=True,
    ),
    Case(
        "aggregate-ours",
        "KPL aggregate, begun by ours, continued by Java",
        records.aggregate_from_ours,
    ),
    Case("prepared-java", "checkpoint prepared by Java", records.prepared_by_java),
    *(
        Case(
            f"prepared-{by}-for-{side}",
            f"record processors, checkpoint prepared for {NAMES[side]}, {by}",
            records.prepared_for(side, by),
            repeats=True,
        )
        for by in ("handoff", "kill")
        for side in SIDES
    ),
    *(
        Case(
            f"{by}-{side}-{'leader' if leads else 'follower'}",
            f"{'SIGTERM' if by == 'stop' else 'kill -9'} of {NAMES[side]} "
            f"{'that leads' if leads else 'that does not lead'}",
            end(side, by, leads=leads),
            repeats=by == "kill",
        )
        for leads in (False, True)
        for by in ("stop", "kill")
        for side in SIDES
    ),
    Case("moved", "Java moves the application alone, and ours joins", layouts.moved),
    Case("upgrade", "KCL 2.x is replaced, and comes back after a rollback", layouts.upgrade),
    Case("older", "a version without the single table has joined", layouts.older),
    Case("recreated", "the stream is created again, ours leads", layouts.recreated, repeats=True),
)
