"""`kcl-pipeline application`: show and change the recorded streams and sink."""

from __future__ import annotations

import os
import socket
from random import SystemRandom
from typing import Annotated
from uuid import uuid4

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.exit_codes import FAILED
from kcl_pipeline.cli.target import (
    Application,
    AsJson,
    Pipeline,
    Streams,
    Target,
    target,
)
from kcl_pipeline.errors import OtherApplicationError, SettingsError
from kcl_pipeline.events import Event, ignore_events
from kcl_pipeline.leader.accept import Acceptance, ApplicationChange
from kcl_pipeline.leader.lock import LeaderElection
from kcl_pipeline.leases.application.identity import ApplicationIdentity, successor
from kcl_pipeline.leases.identity_check import as_json as record_as_json
from kcl_pipeline.metrics.exporters import text_of
from kcl_pipeline.text import counted

MISMATCH = "the settings differ: "


def application(
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    accept_streams: Annotated[
        bool,
        typer.Option(
            "--accept-streams",
            help="Record the streams of the settings. All leases, and so all positions, are "
            "deleted, except when a list of several streams changes to another such list. No "
            "worker may run.",
        ),
    ] = False,
    accept_sink: Annotated[
        bool,
        typer.Option(
            "--accept-sink",
            help="Record the sink of the pipeline. Leases and positions are kept. No worker may "
            "run.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the recorded streams and sink of an application, and compare them with the settings.

    The exit code is 1 if they differ.
    """
    app = target(application, stream, pipeline, needs_streams=accept_streams)
    configured = None
    if pipeline is not None or stream:
        configured = _configured(app)
    if accept_sink and (configured is None or configured.sink is None):
        raise SettingsError("--accept-sink needs the sink; write --pipeline module:attribute")
    if accept_streams and app.settings.selects_streams:
        raise SettingsError("--accept-streams needs streams by name; write --stream NAME twice")
    for accepted in _accept(app, configured, streams=accept_streams, sink=accept_sink):
        typer.echo(_result_text(accepted), err=True)
    record = app.tables.coordinator.read_application()
    problem = None
    if record is not None and configured is not None:
        problem = _problem(app, record.identity, configured)
    if as_json:
        show.print_json({"recorded": record_as_json(record), "problem": problem})
    else:
        identity = None if record is None else record.identity
        _print(app.settings.application_name, identity)
        if problem is not None:
            typer.echo(MISMATCH + problem)
    if problem is not None:
        raise typer.Exit(FAILED)


def _configured(app: Target) -> ApplicationIdentity:
    from kcl_pipeline.pipeline import KinesisPipeline, sink_address  # noqa: PLC0415 (AWS only here)

    is_multi_stream, found = app.settings.is_multi_stream, app.pipeline
    sink = sink_address(found.sink) if isinstance(found, KinesisPipeline) else None
    streams = [
        app.kinesis.resolve_stream(name, multi_stream=is_multi_stream)
        for name in app.settings.streams
    ]
    return ApplicationIdentity.of(
        streams,
        is_multi_stream=is_multi_stream,
        sink=sink,
        shard_sync_of=app.settings.shard_sync_of,
        whole_aggregates=app.settings.retrieval.skip_kpl_deaggregation if found else None,
    )


def _accept(
    app: Target, configured: ApplicationIdentity | None, *, streams: bool, sink: bool
) -> list[Acceptance]:
    if configured is None or not (streams or sink):
        return []
    change = _change(app)
    accepted = [change.accept_streams(configured)] if streams else []
    return [*accepted, change.accept_sink(configured, str(uuid4()))] if sink else accepted


def _change(app: Target) -> ApplicationChange:

    tables, settings = app.tables, app.settings
    owner = f"kcl-pipeline-application/{socket.gethostname()}/{os.getpid()}"
    election = LeaderElection(
        tables.coordinator, owner, app.clock, ignore_events, settings.leader, SystemRandom()
    )
    return ApplicationChange(
        settings, tables.lease, tables.workers, tables.coordinator, app.clock, election, _show_event
    )


def _show_event(event: Event) -> None:

    typer.echo(text_of(event), err=True)


def _problem(
    app: Target, recorded: ApplicationIdentity, configured: ApplicationIdentity
) -> str | None:

    try:
        successor(app.settings.application_name, recorded, configured)
    except OtherApplicationError as error:
        return str(error)
    return None


def _print(name: str, identity: ApplicationIdentity | None) -> None:

    if identity is None:
        typer.echo(
            f"no streams are recorded for application {name} yet; its first start records them"
        )
        return
    typer.echo(f"application {name}: {identity.mode.replace('_', ' ')}")
    for stream in identity.streams:
        typer.echo(f"stream {stream}")
    typer.echo(f"sink {identity.sink or 'not recorded yet'}")
    if identity.changing:
        typer.echo("a change of the streams has started and is not finished")


def _result_text(accepted: Acceptance) -> str:
    if accepted.before == accepted.after:
        return "no change: the record has these values already"
    return f"recorded; {counted(accepted.deleted, 'lease')} deleted"
