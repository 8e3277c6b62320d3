"""`kcl-pipeline losses`: show how many losses of records there were, and acknowledge them."""

from functools import partial
from typing import Annotated

import msgspec
import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.target import Application, AsJson, Pipeline, Streams, target
from kcl_pipeline.leases.application.losses import Losses


def losses(
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    acknowledge: Annotated[
        bool,
        typer.Option(
            "--acknowledge",
            help="Store the number of losses that this command shows. The check no_records_lost "
            "passes until the next loss.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the number of losses of records, and the last loss with its positions and times."""
    app = target(application, stream, pipeline)
    table = app.tables.coordinator
    record = table.read_losses()
    if not as_json:
        show.echo(record.sentence)
        if record.count > 1:
            show.echo("The others are in the logs as records_lost and table_restored events.")
    if acknowledge:
        now_millis = int(app.clock.wall() * 1000)
        record = table.change_losses(
            partial(Losses.with_acknowledged, shown=record, now_millis=now_millis)
        )
    if as_json:
        fields = msgspec.to_builtins(record)
        show.print_json({**fields, "unacknowledged": record.unacknowledged})
    elif acknowledge:
        show.echo(f"{record.acknowledged} of {record.count} acknowledged")
