"""Say in one sentence what a tick of the leader sensor did.

The sentence is the tick's skip reason. Dagster shows that only while the mouse is over the tick, so
the sentence is also the first entry of the cursor, which is a column of the ticks' table.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dagster import DagsterRunStatus

from kcl_pipeline.leader.report import CycleReport
from kcl_pipeline.orchestration.assets.runs.runs import RunView
from kcl_pipeline.orchestration.sensors.reports.tables import lease_text, move_text
from kcl_pipeline.orchestration.sensors.scaling.autoscaler import AutoscalerMemory, ScalingDecision
from kcl_pipeline.text import counted

TICK = "tick"
SHOWN_MOVES = 3
_KINDS = {
    DagsterRunStatus.STARTED: "run",
    DagsterRunStatus.QUEUED: "queued",
    DagsterRunStatus.CANCELING: "stopping",
}


@dataclass(slots=True)
class LeaderSince:
    """Since when this sensor has observed the leader.

    Attributes:
        owner: The leader. None: none, or unknown.
        since: Epoch seconds of the first observation.
        is_exact: Whether this sensor has observed the change.
    """

    owner: str | None = None
    since: float | None = None
    is_exact: bool = False

    def observe(self, owner: str | None, wall_seconds: float) -> None:
        """Add one observation."""
        if self.since is None or owner != self.owner:
            self.is_exact = self.since is not None
            self.owner, self.since = owner, wall_seconds

    def text(self) -> str:
        """The leader and since when, such as `worker orders-7f leads since 12:03 UTC`."""
        if self.owner is None or self.since is None:
            return "nobody leads"
        kind = "sensor" if self.owner.startswith("dagster/") else "worker"
        time = f"{datetime.fromtimestamp(self.since, UTC):%H:%M} UTC"
        return f"{kind} {self.owner} leads since {time}{'' if self.is_exact else ' or earlier'}"


def leading_text(report: CycleReport, problem: str | None, since: LeaderSince) -> str:
    """What the leader cycle did, or why it did not lead."""
    if not report.led:
        return f"did not lead: {problem or since.text()}"
    finished = sum(1 for lease in report.leases if lease.ended)
    text = (
        f"led: {counted(len(report.leases), 'lease')}"
        + (f" ({finished} finished)" if finished else "")
        + f", {counted(len(report.workers), 'worker')}, {moves_text(report)}, "
        f"{report.seconds * 1000:.0f} ms"
    )
    return f"{text}; {problem}" if problem else text


def moves_text(report: CycleReport) -> str:
    """The moves of a cycle with their reasons: the first ones, and how many more there are."""
    moves = () if report.plan is None else report.plan.moves
    if not moves:
        return "no move"
    texts = [
        f"{lease_text(one.lease_key)} {move_text(one.from_worker, one.to_worker)} ({one.reason})"
        for one in moves[:SHOWN_MOVES]
    ]
    more = len(moves) - SHOWN_MOVES
    return f"moved {'; '.join(texts)}" + (f" and {more} more" if more > 0 else "")


def runs_text(
    active: Sequence[RunView], decision: ScalingDecision, problems: Sequence[str] = ()
) -> str:
    """How many of the desired workers run, what the other runs wait for, and the problems."""
    counts = Counter(_KINDS.get(run.status, "starting") for run in active if run.continuous)
    runs, desired = counts.pop("run", 0), decision.memory.desired
    parts = [
        f"{runs} of {counted(desired, 'worker')} {'runs' if runs == 1 else 'run'}"
        if runs <= desired
        else f"{counted(runs, 'worker')} {'runs' if runs == 1 else 'run'}, {desired} "
        f"{'is' if desired == 1 else 'are'} needed",
        *(
            f"{number} {'is' if number == 1 else 'are'} {kind}"
            for kind, number in sorted(counts.items())
        ),
    ]
    _, _, action = decision.reason.partition(": ")
    return "; ".join([", ".join(parts) + (f": {action}" if action else ""), *problems])


def cursor_text(sentence: str, memory: AutoscalerMemory) -> str:
    """The cursor: the sentence, then the memory of the autoscaler without its default values.

    Entries that are not known are ignored when it is read.
    """
    entries = memory.model_dump(mode="json", exclude_defaults=True) | {"desired": memory.desired}
    rounded = {
        name: round(value) if isinstance(value, float) else value for name, value in entries.items()
    }
    ordered = {"desired": rounded.pop("desired")} | rounded
    return json.dumps({TICK: sentence} | ordered, ensure_ascii=False)
