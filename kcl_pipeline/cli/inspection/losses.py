"""`kcl-pipeline losses`: show lost records, and acknowledge them."""

from typing import Annotated

import msgspec
import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.target import Application, AsJson, Pipeline, Streams, target
from kcl_pipeline.leases.application.losses import (
    Loss,
    LossLog,
    time_text,
)
from kcl_pipeline.leases.tables import CoordinatorStateTable
from kcl_pipeline.text import counted

COLUMNS = ("shard", "reason", "after", "until", "before", "arrived", "recorded", "acknowledged")


def losses(
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    acknowledge: Annotated[
        bool,
        typer.Option(
            "--acknowledge",
            help="Mark the losses that this command shows. The check no_records_lost passes until "
            "the next loss.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show records that were lost, with their shard, reason, positions and times."""
    app = target(application, stream, pipeline)
    table = app.tables.coordinator
    shown = table.read_losses().log
    if not as_json:
        _print(shown)
    after, marked = shown, 0
    if acknowledge and shown.unacknowledged:
        after, marked = _acknowledge(table, shown, int(app.clock.wall() * 1000))
    if as_json:
        show.print_json(
            {
                "losses": msgspec.to_builtins(shown.losses),
                "unlisted": shown.unlisted,
                "unacknowledged": after.unacknowledged,
                "acknowledged": after.acknowledged,
                "acknowledged_millis": after.acknowledged_millis,
                "marked": marked if acknowledge else None,
            }
        )
    elif acknowledge:
        losses = counted(marked, "loss", "losses")
        show.echo(f"{losses} acknowledged; {after.unacknowledged} not acknowledged")


def _acknowledge(
    table: CoordinatorStateTable, shown: LossLog, now_millis: int
) -> tuple[LossLog, int]:
    """Return the changed record, and how many losses this command has acknowledged.

    Losses that another process acknowledged since `shown` was read are not counted.
    """
    marked = 0

    def change(log: LossLog) -> LossLog:
        nonlocal marked
        changed = log.with_acknowledged(shown, now_millis)
        marked = changed.acknowledged - log.acknowledged
        return changed

    return table.change_losses(change), marked


def _print(found: LossLog) -> None:
    show.print_table(
        f"{counted(found.unacknowledged, 'loss', 'losses')} not acknowledged",
        COLUMNS,
        [_row(loss) for loss in reversed(found.losses)],
    )
    if found.unlisted:
        show.echo(f"and {found.unlisted} earlier losses, which do not fit into the record")


def _row(loss: Loss) -> tuple[str, ...]:
    arrived = (loss.first_arrival_millis, loss.last_arrival_millis)
    return (
        loss.label,
        str(loss.reason),
        loss.after or show.NONE,
        loss.until or show.NONE,
        loss.before or show.NONE,
        show.NONE if arrived == (None, None) else " to ".join(map(time_text, arrived)),
        f"{time_text(loss.recorded_millis)} by {loss.reporter}",
        time_text(loss.acknowledged_millis) or show.NONE,
    )
