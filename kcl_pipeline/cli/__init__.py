"""Define the command line `kcl-pipeline`.

Heavy modules (boto3, pyspark, pyarrow) are imported inside the commands that need them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kcl_pipeline.cli.application import application
from kcl_pipeline.cli.dead_letters import dead_letters
from kcl_pipeline.cli.doctor.command import doctor
from kcl_pipeline.cli.failures import SentenceGroup
from kcl_pipeline.cli.leader import leader
from kcl_pipeline.cli.leases import leases
from kcl_pipeline.cli.local import local
from kcl_pipeline.cli.losses import losses
from kcl_pipeline.cli.plan import plan
from kcl_pipeline.cli.run import dev, run
from kcl_pipeline.cli.worker import worker
from kcl_pipeline.cli.workers import workers
from kcl_pipeline.version import __version__

app = typer.Typer(
    name="kcl-pipeline",
    cls=SentenceGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Kinesis Client Library 3.x in Python. Region, endpoint and credentials of AWS come "
    "from the environment: AWS_REGION, AWS_ENDPOINT_URL, AWS_PROFILE.",
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"kcl-pipeline {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Take the options that come before the command."""


app.command()(run)
app.command()(dev)
app.command()(worker)
app.command()(local)
app.command()(leases)
app.command()(workers)
app.command()(leader)
app.command()(plan)
app.command()(application)
app.command(name="dead-letters")(dead_letters)
app.command()(losses)
app.command()(doctor)
