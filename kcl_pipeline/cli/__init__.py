"""Define the command line `kcl-pipeline`.

Heavy modules (boto3, pyspark, pyarrow) are imported inside the commands that need them.
"""

from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from kcl_pipeline.cli.control.moving import drain, move, rebalance
from kcl_pipeline.cli.control.pausing import pause, resume
from kcl_pipeline.cli.control.replay import replay
from kcl_pipeline.cli.control.retire import retire
from kcl_pipeline.cli.control.seek import seek
from kcl_pipeline.cli.doctor.command import doctor
from kcl_pipeline.cli.failures import SentenceGroup
from kcl_pipeline.cli.init import init
from kcl_pipeline.cli.inspection.application import application
from kcl_pipeline.cli.inspection.dead_letters import dead_letters
from kcl_pipeline.cli.inspection.leader import leader
from kcl_pipeline.cli.inspection.leases import leases
from kcl_pipeline.cli.inspection.losses import losses
from kcl_pipeline.cli.inspection.plan import plan
from kcl_pipeline.cli.inspection.workers import workers
from kcl_pipeline.cli.local import local
from kcl_pipeline.cli.maintenance import compact, vacuum
from kcl_pipeline.cli.run import dev, run
from kcl_pipeline.cli.top.command import top
from kcl_pipeline.cli.worker import worker
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


def _group(show: Callable[..., None], commands: Mapping[str, Callable[..., None]]) -> typer.Typer:
    """A command that shows rows, with commands that change them."""
    group = typer.Typer(cls=SentenceGroup, pretty_exceptions_enable=False)
    group.callback(invoke_without_command=True)(show)
    for name, command in commands.items():
        group.command(name)(command)
    return group


app.add_typer(_group(leases, {"move": move}), name="leases")
app.add_typer(_group(workers, {"drain": drain}), name="workers")
for _command in (
    *(init, run, dev, worker, local),
    *(top, leader, plan, application, dead_letters, losses),
    *(pause, resume, rebalance, seek, retire),
    *(compact, vacuum, replay, doctor),
):
    app.command()(_command)
