"""`kcl-pipeline status`: show what is wrong with an application, its workers and its leases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from kcl_pipeline.cli import show
from kcl_pipeline.cli.target import Application, AsJson, Pipeline, Streams, Target, target
from kcl_pipeline.text import counted, duration_text

if TYPE_CHECKING:
    from kcl_pipeline.status.findings import Finding
    from kcl_pipeline.status.rows import LeaseRow, OwnerChange, OwnerLoad, WorkerRow
    from kcl_pipeline.status.snapshot import Snapshot

STYLES: Final = {"ok": "green", "warning": "yellow", "problem": "red", "unknown": "dim"}
LEVEL_WIDTH: Final = 8
NO_OWNER: Final = "(no owner)"


class By(StrEnum):
    """What `--by` groups leases by."""

    WORKER = "worker"
    GROUP = "group"


def status(
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    by: Annotated[
        By | None,
        typer.Option(
            "--by", help="Count the leases per worker, or per worker group.", show_default=False
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Look again and again until Ctrl-C. Shows who reports, which leases are renewed, "
            "and moves.",
        ),
    ] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="Time between two looks of --watch.")
    ] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Show what is wrong with an application, its workers and its leases.

    One look shows ages as the clocks of their writers say. `--watch` and `doctor` look twice, and
    so find workers and leaders that have ended. The exit code is 0 also if something is wrong.
    """
    app = target(application, stream, pipeline)
    # Loaded here: other commands do not need the rows.
    from kcl_pipeline.status.rows import OwnerChanges  # noqa: PLC0415
    from kcl_pipeline.status.snapshot import READS, compared, read_snapshot  # noqa: PLC0415

    kinesis = app.kinesis if app.names_streams else None

    def look() -> Snapshot:
        found = read_snapshot(app.tables, app.settings, app.clock, kinesis)
        if len(found.failures) >= READS:  # nothing can be shown
            raise found.failures[0].error
        return found

    snapshot, changes = look(), OwnerChanges()
    if not watch or as_json:
        if as_json:
            show.print_json(as_dict(snapshot, app, by))
        else:
            show_page(snapshot, app, by)
        return
    began, page = app.clock.monotonic(), render(snapshot, app, by, changes.observe(snapshot))
    with Live(page, console=show.console(), auto_refresh=False) as live:
        while True:
            app.clock.sleep(seconds)
            now = look()
            # Compared with the last look that is old enough to show whether anybody lives.
            elapsed = app.clock.monotonic() - began
            found = compared(snapshot, now, elapsed)
            if elapsed >= period_seconds(app):
                snapshot, began = now, app.clock.monotonic()
            live.update(render(found, app, by, changes.observe(now)), refresh=True)


def show_page(snapshot: Snapshot, app: Target, by: By | None) -> None:
    """Print one page. Sentences are not wrapped, so that they can be searched."""
    texts, tables = page_of(snapshot, app, by, [])
    out = show.console()
    for text in texts:
        out.print(text, soft_wrap=True)
    out.print(tables)


def period_seconds(app: Target) -> float:
    """How long a second look must wait, so that everybody who lives has written its row."""
    settings = app.settings
    return (
        max(
            settings.lease.failover_time_millis,
            settings.worker.worker_metrics_reporter_freq_in_millis,
        )
        / 1000
        + 1.0
    )


def judged(snapshot: Snapshot) -> list[Finding]:
    """The findings with the default limits."""
    from kcl_pipeline.status.findings import findings_of  # noqa: PLC0415 (see above)
    from kcl_pipeline.status.limits import CheckLimits  # noqa: PLC0415 (likewise)

    return findings_of(snapshot, CheckLimits())


def as_dict(snapshot: Snapshot, app: Target, by: By | None = None) -> dict[str, Any]:
    """The whole status for `--json`."""
    from kcl_pipeline.status import frames  # noqa: PLC0415 (see above)

    lock = snapshot.lock
    return {
        "application": snapshot.application,
        "at": snapshot.at,
        "streams": list(snapshot.streams),
        "pause": None if snapshot.pause is None else asdict(snapshot.pause),
        "leader": getattr(lock, "owner_name", None),
        "findings": [asdict(one) for one in judged(snapshot)],
        "workers": frames.records(frames.worker_frame(snapshot, _separator(app))),
        "leases": frames.records(frames.lease_frame(snapshot)),
        **({} if by is None else {"by": [asdict(row) for row in _loads(snapshot, app, by)]}),
    }


def render(
    snapshot: Snapshot, app: Target, by: By | None, moves: Sequence[OwnerChange]
) -> RenderableType:
    """Draw the page."""
    texts, tables = page_of(snapshot, app, by, moves)
    return Group(*texts, tables)


def page_of(
    snapshot: Snapshot, app: Target, by: By | None, moves: Sequence[OwnerChange]
) -> tuple[list[Text], RenderableType]:
    """The sentences and the tables of the page."""
    from kcl_pipeline.status.rows import lease_rows, worker_rows  # noqa: PLC0415 (see above)

    findings, workers = judged(snapshot), worker_rows(snapshot, _separator(app))
    body: list[RenderableType] = [
        show.table("Workers", WORKER_COLUMNS, map(_worker_cells, workers), numbers=_NUMBERS)
    ]
    if by is None:
        rows = map(_lease_cells, lease_rows(snapshot, ended=False))
        body.append(show.table("Leases", LEASE_COLUMNS, rows, numbers=_NUMBERS))
    else:
        loads = map(_load_cells, _loads(snapshot, app, by))
        columns = [by.value, *LOAD_COLUMNS]
        body.append(show.table(f"Leases by {by.value}", columns, loads, numbers=LOAD_COLUMNS))
    if moves:
        body.append(show.table("Moves", MOVE_COLUMNS, map(_move_cells, moves)))
    lines = shown(findings)
    return [_head(snapshot), *map(finding_text, lines, [None, *lines])], Group(*body)


def shown(findings: Iterable[Finding]) -> list[Finding]:
    """The faults, or else what passes."""
    every = list(findings)
    return [one for one in every if one.is_fault] or every


def finding_text(finding: Finding, before: Finding | None) -> Text:
    """A finding, with its advice on a second line if the finding before has another one."""
    advice = "" if before is not None and before.advice == finding.advice else finding.advice
    return level_text(finding.level.value, f"{finding.name}: {finding.sentence}", advice)


def level_text(level: str, text: str, advice: str) -> Text:
    """A level in its color, a sentence, and the advice on a second line."""
    line = Text.assemble((level, STYLES[level]), " " * (LEVEL_WIDTH - len(level)), show.plain(text))
    if advice:
        line.append(f"\n{' ' * (LEVEL_WIDTH + 1)}→ ").append_text(show.plain(advice))
    return line


def _head(snapshot: Snapshot) -> Text:
    lag, leases = snapshot.lag_seconds, snapshot.unfinished
    ended = len(snapshot.leases) - len(leases)
    texts = [
        f"{snapshot.application} at {datetime.fromtimestamp(snapshot.at, UTC):%H:%M:%S} UTC",
        counted(len(snapshot.workers), "worker"),
        f"{counted(len(leases), 'lease')} and {ended} ended",
        f"{sum(le.throughput_kbps or 0.0 for le in leases):,.1f} KiB/s",
        "lag unknown" if lag is None else f"largest lag {lag:,.1f} s",
    ]
    return show.plain(", ".join(texts), "bold")


WORKER_COLUMNS: Final = ("worker", "state", "leases", "CPU %", "KiB/s", "lag", "batch", "report")
LEASE_COLUMNS: Final = ("lease", "worker", "state", "lag", "KiB/s", "checkpoint")
LOAD_COLUMNS: Final = ("leases", "ended", "in handoff", "KiB/s")
MOVE_COLUMNS: Final = ("seen", "lease", "from", "to")
_NUMBERS: Final = ("leases", "CPU %", "KiB/s", "lag")


def _worker_cells(row: WorkerRow) -> Sequence[str]:
    last = row.last_batch_seconds
    return (
        row.worker_id,
        row.state_text,
        str(row.leases),
        show.number(row.cpu_percent),
        show.number(row.kbps),
        row.lag_text,
        show.NONE if last is None else f"{duration_text(last)} ago",
        f"{duration_text(row.report_seconds)} ago",
    )


def _lease_cells(row: LeaseRow) -> Sequence[str]:
    state = row.state if row.why is None else f"{row.state}: {row.why}"
    return (
        row.lease_key,
        row.worker or NO_OWNER,
        state,
        row.lag_text,
        show.number(row.kbps),
        row.checkpoint,
    )


def _load_cells(row: OwnerLoad) -> Sequence[str]:
    return (
        row.name,
        str(row.leases),
        str(row.ended),
        str(row.in_handoff),
        show.number(row.kbps),
    )


def _move_cells(row: OwnerChange) -> Sequence[str]:
    return (
        f"{datetime.fromtimestamp(row.at, UTC):%H:%M:%S}",
        row.lease_key,
        row.from_worker or NO_OWNER,
        row.to_worker or NO_OWNER,
    )


def _loads(snapshot: Snapshot, app: Target, by: By) -> list[OwnerLoad]:
    from kcl_pipeline.status.rows import load_rows  # noqa: PLC0415 (see above)

    return load_rows(snapshot.leases, None if by is By.WORKER else _separator(app))


def _separator(app: Target) -> str:
    return app.settings.worker.worker_group_separator
