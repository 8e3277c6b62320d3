"""Record the streams or the sink of the settings, and compare them with the recorded ones."""

from __future__ import annotations

import os
import socket
from random import SystemRandom
from uuid import uuid4

from kcl_pipeline.control.context import Effect, OperationContext
from kcl_pipeline.errors import OtherApplicationError, SettingsError
from kcl_pipeline.events import ignore_events
from kcl_pipeline.leader.accept import Acceptance, ApplicationChange
from kcl_pipeline.leader.lock import LeaderElection
from kcl_pipeline.leases.application import ApplicationIdentity, successor
from kcl_pipeline.leases.identity_check import as_json
from kcl_pipeline.metrics.exporters import text_of
from kcl_pipeline.text import counted


def accept(context: OperationContext, *, streams: bool, sink: bool) -> Effect:
    """Record what the settings have, and compare.

    Raises:
        SettingsError: The settings do not name the streams or the sink.
        ApplicationInUseError: A worker or a leader is alive.
    """
    app = context.control
    configured = None if context.identity is None else context.identity()
    if sink and (configured is None or configured.sink is None):
        raise SettingsError("the sink is not known; name the pipeline, not the application")
    if streams and (configured is None or app.settings.selects_streams):
        raise SettingsError("the streams are not known by name; write --stream NAME per stream")
    lines = []
    if configured is not None and (streams or sink):
        change = _change(context)
        if streams:
            lines.append(_text(change.accept_streams(configured)))
        if sink:
            lines.append(_text(change.accept_sink(configured, str(uuid4()))))
    record = app.coordinator.read_application()
    problem = None
    if record is not None and configured is not None:
        try:
            successor(app.name, record.identity, configured)
        except OtherApplicationError as error:
            problem = str(error)
    lines += _record(app.name, None if record is None else record.identity)
    if problem is not None:
        lines.append(f"the settings differ: {problem}")
    return Effect({"recorded": as_json(record), "problem": problem}, lines, problem is None)


def _change(context: OperationContext) -> ApplicationChange:
    app = context.control
    owner = f"kcl-pipeline-accept/{socket.gethostname()}/{os.getpid()}"
    leader = app.settings.leader
    election = LeaderElection(
        app.coordinator, owner, app.clock, ignore_events, leader, SystemRandom()
    )
    return ApplicationChange(
        app.settings,
        app.leases,
        app.workers,
        app.coordinator,
        app.clock,
        election,
        lambda event: context.say(text_of(event)),
    )


def _text(accepted: Acceptance) -> str:
    if accepted.before == accepted.after:
        return "no change: the record has these values already"
    return f"recorded; {counted(accepted.deleted, 'lease')} deleted"


def _record(name: str, identity: ApplicationIdentity | None) -> list[str]:
    if identity is None:
        return [f"no streams are recorded for application {name} yet; its first start records them"]
    lines = [
        f"application {name}: {identity.mode.replace('_', ' ')}",
        *(f"stream {stream}" for stream in identity.streams),
        f"sink {identity.sink or 'not recorded yet'}",
    ]
    if identity.changing:
        lines.append("a change of the streams has started and is not finished")
    return lines
