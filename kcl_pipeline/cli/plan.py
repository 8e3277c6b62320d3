"""`kcl-pipeline plan --dry-run`: what the leader would do now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.leases import NOBODY
from kcl_pipeline.cli.target import Application, AsJson, Pipeline, Streams, target

if TYPE_CHECKING:
    from kcl_pipeline.leader.preview import Preview
    from kcl_pipeline.leases.lease import Lease
    from kcl_pipeline.leases.tables import WorkerMetrics
    from kcl_pipeline.planning.model import Move


@dataclass(frozen=True, slots=True)
class Load:
    """What one worker has, and would have: unfinished leases and their known throughput in KiB/s."""

    worker: str
    leases_before: int
    leases_after: int
    kbps_before: float
    kbps_after: float


def plan(
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing. There is no other way: only the leader moves leases.")] = True,
    observe_seconds: Annotated[
        float, typer.Option("--observe-seconds", min=0, help="Watch this long for owners that are gone; with 0 every owner counts as alive.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Show the moves the leader would make now, with reasons, and every worker's load before and after."""
    del dry_run  # it is how people ask for a preview; there is nothing else to do
    app = target(application, stream, pipeline, needs_streams=True)
    from kcl_pipeline.leader.preview import preview  # noqa: PLC0415 (pyarrow and the planners are loaded only here)

    tables = app.tables
    found = preview(app.settings, tables.lease, tables.workers, app.kinesis, app.clock, observe_seconds=observe_seconds)
    if as_json:
        show.print_json(as_dict(found))
    else:
        _print(found)


def loads(leases: Iterable[Lease], workers: Iterable[WorkerMetrics], moves: Iterable[Move]) -> tuple[Load, ...]:
    """Every worker's load, sorted by id; leases that nobody has come last. A lease in a handoff counts for the worker it goes to. Pure."""
    live = [lease for lease in leases if not lease.ended]
    before = {lease.lease_key: lease.owner or NOBODY for lease in live}
    after = before | {move.lease_key: move.to_worker for move in moves if move.lease_key in before}
    kbps = {lease.lease_key: lease.throughput_kbps or 0.0 for lease in live}
    names = {row.worker_id for row in workers} | set(before.values()) | set(after.values())

    def load(name: str) -> Load:
        had, has = ([key for key, owner in owners.items() if owner == name] for owners in (before, after))
        return Load(name, len(had), len(has), round(sum(kbps[k] for k in had), 1), round(sum(kbps[k] for k in has), 1))

    return tuple(load(name) for name in sorted(names, key=lambda name: (name == NOBODY, name)))


def as_dict(found: Preview) -> dict[str, Any]:
    """All of it, for programs."""
    return {
        "strategy": found.plan.strategy,
        "moves": [asdict(move) for move in found.plan.moves],
        "spilled": list(found.plan.spilled),
        "notes": list(found.plan.notes),
        "loads": [asdict(load) for load in _loads(found)],
        "create": [{"lease_key": lease.lease_key, "checkpoint": str(lease.checkpoint)} for lease in found.create],
        "delete": [asdict(deletion) for deletion in _deletions(found)],
        "expired": list(found.expired),
        "unreadable": list(found.unreadable),
        "coverage": [asdict(coverage) for coverage in found.coverage],
        "observed_seconds": found.observed_seconds,
    }


def _loads(found: Preview) -> tuple[Load, ...]:
    return loads((*found.leases, *found.create), found.workers, found.plan.moves)


@dataclass(frozen=True, slots=True)
class _Deletion:
    lease_key: str
    reason: str


def _deletions(found: Preview) -> list[_Deletion]:
    return [_Deletion(deletion.lease.lease_key, deletion.reason) for deletion in found.delete]


def _print(found: Preview) -> None:
    for hole in (c for c in found.coverage if not c.complete):
        typer.echo(f"stream {hole.stream}: {hole.hole}")
    _print_if("Leases to create", ["lease", "from"], [[lease.lease_key, str(lease.checkpoint)] for lease in found.create])
    _print_if("Leases to delete, once kept long enough", ["lease", "reason"], [[d.lease_key, d.reason] for d in _deletions(found)])
    moves = [[move.lease_key, move.from_worker or NOBODY, move.to_worker, move.reason] for move in found.plan.moves]
    show.print_table(f"Moves by {found.plan.strategy}", ["lease", "from", "to", "reason"], moves)
    show.print_table(
        "Load before and after",
        columns := ["worker", "leases", "after", "KiB/s", "after KiB/s"],
        [[row.worker, str(row.leases_before), str(row.leases_after), show.number(row.kbps_before), show.number(row.kbps_after)] for row in _loads(found)],
        numbers=columns[1:],
    )
    for text in found.plan.notes:
        typer.echo(f"note: {text}")
    if found.plan.spilled:
        typer.echo(f"nobody can take: {', '.join(found.plan.spilled)}")
    if found.unreadable:
        typer.echo(f"not readable as leases: {', '.join(found.unreadable)}")
    if found.expired:
        typer.echo(f"not renewed in time: {', '.join(found.expired)}")
    elif not found.observed_seconds:
        typer.echo("every owner was taken for alive; --observe-seconds 30 would find those that are gone")


def _print_if(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        show.print_table(title, columns, rows)
