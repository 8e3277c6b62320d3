"""`kcl-pipeline run` and `kcl-pipeline dev`: the demonstration, bounded or with the page left
open.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kcl_pipeline.clock import SystemClock

Events = Annotated[int, typer.Option(min=1_000, help="Orders to publish.")]
PerSecond = Annotated[int, typer.Option(min=100, help="Orders per second.")]
Folder = Annotated[
    Path, typer.Option(help="Where table, logs and Dagster's home go; emptied at the start.")
]
PagePort = Annotated[
    int,
    typer.Option(
        min=1, max=65_535, help="Port of the Dagster UI; another free one when it is taken."
    ),
]


def run(
    events: Events = 200_000,
    per_second: PerSecond = 2_500,
    folder: Folder = Path(".run"),
    page_port: PagePort = 3000,
) -> None:
    """Run the whole pipeline on the embedded AWS, through two reshards and a changing fleet, and
    give a verdict.
    """
    raise typer.Exit(_demo(events, per_second, folder, page_port, stay_open=False))


def dev(
    events: Events = 200_000,
    per_second: PerSecond = 2_500,
    folder: Folder = Path(".run"),
    page_port: PagePort = 3000,
) -> None:
    """The same as `run`, with the page left open until Ctrl-C."""
    raise typer.Exit(_demo(events, per_second, folder, page_port, stay_open=True))


def _demo(events: int, per_second: int, folder: Path, page_port: int, *, stay_open: bool) -> int:
    from kcl_pipeline.local.demo.run import DemoOptions, run_demo  # noqa: PLC0415
    from kcl_pipeline.spark.java import require_java  # noqa: PLC0415 (loaded only here, as below)

    require_java()
    options = DemoOptions(events=events, per_second=per_second, folder=folder, page_port=page_port)
    return run_demo(options, SystemClock(), typer.echo, stay_open=stay_open)
