"""`kcl-pipeline application`: what is recorded of an application, and how to change it."""

from __future__ import annotations

import os
import socket
from random import SystemRandom
from typing import TYPE_CHECKING, Annotated

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.failures import FAILED
from kcl_pipeline.cli.target import (
    Application,
    AsJson,
    Pipeline,
    Streams,
    Target,
    load_pipeline,
    target,
)
from kcl_pipeline.errors import OtherApplicationError, SettingsError
from kcl_pipeline.events import ignore_events

if TYPE_CHECKING:
    from kcl_pipeline.leader.accept import Acceptance, ApplicationChange
    from kcl_pipeline.leases.application import ApplicationIdentity

DOES_NOT_FIT = "does not fit: "


def application(
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    accept_streams: Annotated[
        bool,
        typer.Option(
            "--accept-streams",
            help="Record the streams of the settings. Deletes all leases, and so all positions, "
            "unless several streams are replaced by several. No worker may run.",
        ),
    ] = False,
    accept_sink: Annotated[
        bool,
        typer.Option(
            "--accept-sink",
            help="Record the sink of the pipeline. Leases and positions stay. No worker may run.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the streams and the sink of an application, and whether the settings fit.

    The exit code is 1 when they do not.
    """
    from kcl_pipeline.leases.application import as_json as record_as_json  # noqa: PLC0415 (below)

    app = target(application, stream, pipeline, needs_streams=accept_streams)
    wanted = None
    if pipeline is not None or stream:
        wanted = _wanted(app, pipeline)
    if accept_sink and (wanted is None or wanted.sink is None):
        raise SettingsError("--accept-sink needs the sink; write --pipeline module:attribute")
    for accepted in _accepted(app, wanted, streams=accept_streams, sink=accept_sink):
        typer.echo(_told(accepted), err=True)
    record = app.tables.coordinator.read_application()
    problem = None
    if record is not None and wanted is not None:
        problem = _problem(app, record.identity, wanted)
    if as_json:
        show.print_json({"recorded": record_as_json(record), "problem": problem})
    else:
        identity = None if record is None else record.identity
        _print(app.settings.application_name, identity)
        if problem is not None:
            typer.echo(DOES_NOT_FIT + problem)
    if problem is not None:
        raise typer.Exit(FAILED)


def _wanted(app: Target, pipeline: str | None) -> ApplicationIdentity:
    from kcl_pipeline.leases.application import ApplicationIdentity  # noqa: PLC0415 (AWS only here)

    is_multi_stream = app.settings.is_multi_stream
    streams = [
        app.kinesis.resolve_stream(name, multi_stream=is_multi_stream)
        for name in app.settings.streams
    ]
    return ApplicationIdentity.of(streams, is_multi_stream=is_multi_stream, sink=_sink(pipeline))


def _sink(pipeline: str | None) -> str | None:
    if pipeline is None:
        return None
    from kcl_pipeline.pipeline import KinesisPipeline, sink_address  # noqa: PLC0415 (likewise)

    found = load_pipeline(pipeline)
    return sink_address(found.sink) if isinstance(found, KinesisPipeline) else None


def _accepted(
    app: Target, wanted: ApplicationIdentity | None, *, streams: bool, sink: bool
) -> list[Acceptance]:
    if wanted is None or not (streams or sink):
        return []
    change = _change(app)
    accepted = [change.accept_streams(wanted)] if streams else []
    return [*accepted, change.accept_sink(wanted)] if sink else accepted


def _change(app: Target) -> ApplicationChange:
    from kcl_pipeline.leader.accept import ApplicationChange  # noqa: PLC0415 (likewise)
    from kcl_pipeline.leader.lock import LeaderElection  # noqa: PLC0415 (likewise)

    tables, settings = app.tables, app.settings
    owner = f"kcl-pipeline-application/{socket.gethostname()}/{os.getpid()}"
    election = LeaderElection(
        tables.coordinator, owner, app.clock, ignore_events, settings.leader, SystemRandom()
    )
    return ApplicationChange(
        settings, tables.lease, tables.workers, tables.coordinator, app.clock, election
    )


def _problem(app: Target, recorded: ApplicationIdentity, wanted: ApplicationIdentity) -> str | None:
    from kcl_pipeline.leases.application import successor  # noqa: PLC0415 (likewise)

    try:
        successor(app.settings.application_name, recorded, wanted)
    except OtherApplicationError as error:
        return str(error)
    return None


def _print(name: str, identity: ApplicationIdentity | None) -> None:
    if identity is None:
        typer.echo(f"nothing is recorded of the application {name} yet; its first start does it")
        return
    typer.echo(f"application {name}: {identity.mode.replace('_', ' ')}")
    for stream in identity.streams:
        typer.echo(f"stream {stream}")
    typer.echo(f"sink {identity.sink or 'not recorded yet'}")
    if identity.changing:
        typer.echo("a change of the streams has begun and is not finished")


def _told(accepted: Acceptance) -> str:
    if accepted.before == accepted.after:
        return "nothing to change: this is recorded already"
    return f"recorded; {accepted.deleted} leases deleted"
