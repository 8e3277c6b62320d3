"""Define the command line `kcl-pipeline`.

Heavy modules (boto3, pyspark, pyarrow) are imported inside the commands that need them.
"""

from typing import Annotated

import typer

from kcl_pipeline.cli.do import do
from kcl_pipeline.cli.doctor.command import doctor
from kcl_pipeline.cli.failures import SentenceGroup
from kcl_pipeline.cli.init import init
from kcl_pipeline.cli.local import local
from kcl_pipeline.cli.plan import plan
from kcl_pipeline.cli.run import dev, run
from kcl_pipeline.cli.status import status
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


for _command in (init, run, dev, worker, local, status, doctor, plan):
    app.command()(_command)
app.add_typer(do, name="do")
