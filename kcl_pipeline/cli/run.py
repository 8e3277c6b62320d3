"""`kcl-pipeline run` and `kcl-pipeline dev`: run the demonstration.

`dev` keeps the Dagster UI running after the verdict.
"""

from pathlib import Path
from typing import Annotated

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.exit_codes import DONE, FAILED
from kcl_pipeline.cli.target import AsJson
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.extras import require
from kcl_pipeline.spark.java import require_java, require_user_name

Events = Annotated[int, typer.Option(min=1_000, help="Orders to publish.")]
PerSecond = Annotated[int, typer.Option(min=100, help="Orders per second.")]
Folder = Annotated[
    Path, typer.Option(help="Folder for table, logs and DAGSTER_HOME; emptied at the start.")
]
PagePort = Annotated[
    int,
    typer.Option(
        min=1, max=65_535, help="Port of the Dagster UI; if it is in use, another one is chosen."
    ),
]


def run(
    events: Events = 200_000,
    per_second: PerSecond = 2_500,
    folder: Folder = Path(".run/demo"),
    page_port: PagePort = 3000,
    as_json: AsJson = False,
) -> None:
    """Run the Dagster project of this folder on the embedded AWS and print a verdict.

    Both pipelines run through two reshards and a changing number of workers. The exit code
    is 1 if an event is missing or repeated. With --json the last line of standard output is the
    verdict.
    """
    _demo(events, per_second, folder, page_port, stay_open=False, as_json=as_json)


def dev(
    events: Events = 200_000,
    per_second: PerSecond = 2_500,
    folder: Folder = Path(".run/demo"),
    page_port: PagePort = 3000,
    as_json: AsJson = False,
) -> None:
    """Run the demonstration, then keep the Dagster UI running until Ctrl-C."""
    _demo(events, per_second, folder, page_port, stay_open=True, as_json=as_json)


def _demo(
    events: int, per_second: int, folder: Path, page_port: int, *, stay_open: bool, as_json: bool
) -> None:
    require("local", "the demonstration")
    require("webserver", "the Dagster UI of the demonstration")
    from kcl_pipeline.local.demo.run import DemoOptions, run_demo  # noqa: PLC0415 (boto3 only here)

    require_java()
    require_user_name()
    if not all(Path(name).is_file() for name in ("workspace.yaml", "assets/orders.py")):
        raise SettingsError(
            f"{Path.cwd()} has no workspace.yaml and assets/orders.py, which the demonstration "
            "runs; go to the folder of a checkout"
        )

    def say(text: str) -> None:
        typer.echo(text, err=as_json)

    options = DemoOptions(events=events, per_second=per_second, folder=folder, page_port=page_port)
    found = run_demo(options, SystemClock(), say, stay_open=stay_open)
    if as_json:
        show.print_json_line(found.as_dict())
    raise typer.Exit(DONE if found.exact else FAILED)
