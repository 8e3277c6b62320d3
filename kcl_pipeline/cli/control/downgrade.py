"""`kcl-pipeline downgrade`: move the positions in the table to the lease rows."""

from typing import Annotated
from uuid import uuid4

import typer

from kcl_pipeline.cli.control.operator import Wait, operated
from kcl_pipeline.cli.control.seek import WAIT_SECONDS, log_of, report_plan, report_sought
from kcl_pipeline.cli.target import AsJson, OnlyPipeline, Pipeline, target
from kcl_pipeline.errors import SettingsError


def downgrade(
    application: OnlyPipeline = None,
    pipeline: Pipeline = None,
    *,
    yes: Annotated[
        bool, typer.Option("--yes", help="Write. Without it, the changes are only shown.")
    ] = False,
    wait: Wait = WAIT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Move the positions in the table to the lease rows; by default only show the changes.

    Afterwards workers with commit_protocol='two_phase', or of a version without positions, continue
    without a repeated record. The application is paused and stays so. Start these workers, then use
    `kcl-pipeline resume`. A worker with positions would store them in the table again.
    """
    from kcl_pipeline.control.seek.downgrade import Downgrade  # noqa: PLC0415 (it needs pyarrow)

    if application is not None or pipeline is None:
        raise SettingsError(
            "the sink of the pipeline has the positions; write --pipeline module:attribute, "
            "without --application"
        )
    app = target(None, None, pipeline)
    moving = Downgrade(operated(app), app.kinesis, log_of(app))
    if yes:
        done = moving.write(str(uuid4()), pause=True, wait_seconds=wait, stay_paused=True)
        report_sought("Positions in the table", done, as_json=as_json)
    else:
        report_plan("Positions in the table", moving.plan(), as_json=as_json)
