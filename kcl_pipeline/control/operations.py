"""The operations on an application, each declared once.

A request is a pydantic model: its fields are the options of `kcl-pipeline do` and the config of the
job `<pipeline>_operate`. `run` does it and returns an `Effect`, which both show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from random import SystemRandom
from typing import Any, ClassVar, Final, Literal
from uuid import uuid4

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from kcl_pipeline.control.context import Effect, OperationContext
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.text import counted

_WAIT: Final = "Seconds to wait for the result. 0: do not wait"
_DRY_RUN: Final = "Change nothing; show what would happen"
MOST_FILES: Final = 20
"""Files that the sentences of a vacuum name."""


class OperationRequest(BaseModel):
    """The options of an operation."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    needs_pipeline: ClassVar[bool] = False
    """Whether the name of the application is not enough."""

    def run(self, context: OperationContext) -> Effect:
        """Do it.

        Raises:
            KclError: It is refused, or a call failed.
        """
        raise NotImplementedError


def _option(name: str) -> dict[str, Any]:
    """The name of an option that differs from the name of its field."""
    return {"option": name}


class PauseRequest(OperationRequest):
    """Pause the application: its workers commit, release their leases and end, and none starts.

    Not complete while a worker of this package holds a lease. Java workers know no pause.
    """

    reason: str = Field("", description="Shown wherever the pause is shown")
    wait_seconds: float = Field(120.0, ge=0, description=_WAIT, json_schema_extra=_option("--wait"))

    def run(self, context: OperationContext) -> Effect:
        """Pause it."""
        from kcl_pipeline.control.pausing import Pausing  # noqa: PLC0415 (AWS only here)

        done = Pausing(context.control).pause(self.reason, wait_seconds=self.wait_seconds)
        return Effect(asdict(done), done.sentences, not done.held or not self.wait_seconds)


class ResumeRequest(OperationRequest):
    """Resume a paused application."""

    def run(self, context: OperationContext) -> Effect:
        """Resume it."""
        from kcl_pipeline.control.pausing import Pausing  # noqa: PLC0415 (AWS only here)

        was = Pausing(context.control).resume().pause
        if was is None:
            return Effect({"was": None}, ["it was not paused"])
        return Effect({"was": asdict(was)}, [f"resumed; it was {was.sentence}"])


class DrainRequest(OperationRequest):
    """Request a worker to end: it commits, its leases go to others, and it exits with 0.

    The leader sensor starts another worker if fewer than the desired ones run.
    """

    worker_id: str = Field(description="The worker", json_schema_extra=_option("--worker"))
    wait_seconds: float = Field(120.0, ge=0, description=_WAIT, json_schema_extra=_option("--wait"))
    dry_run: bool = Field(False, description=_DRY_RUN)

    def run(self, context: OperationContext) -> Effect:
        """Drain it."""
        from kcl_pipeline.control.pausing import drain  # noqa: PLC0415 (AWS only here)

        done = drain(
            context.control, self.worker_id, wait_seconds=self.wait_seconds, dry_run=self.dry_run
        )
        sentence = done.sentence
        if self.dry_run:
            leases = counted(len(done.leases), "lease")
            sentence = f"dry run: {done.worker_id} would end and give up {leases}"
        is_complete = done.ended or self.dry_run or not self.wait_seconds
        return Effect(asdict(done), [sentence], is_complete)


class _TableRequest(OperationRequest):
    """The options that compact and vacuum share."""

    needs_pipeline: ClassVar[bool] = True
    table: Literal["output", "dead-letters", "all"] = Field(
        "output", description="Which tables of the pipeline: output, dead-letters or all"
    )
    dry_run: bool = Field(False, description=_DRY_RUN)

    def tables(self, context: OperationContext) -> list[tuple[str, dict[str, str], bool]]:
        """Address, storage options, and whether the table exists."""
        from kcl_pipeline.batch import dead_letter_address  # noqa: PLC0415 (it needs pyarrow)
        from kcl_pipeline.delta.maintenance import table_exists  # noqa: PLC0415 (Delta)

        sink = context.sink
        options = dict(getattr(sink, "storage_options", None) or {})
        output, letters = getattr(sink, "uri", None), dead_letter_address(sink)
        named = [output] if output and self.table != "dead-letters" else []
        named += [letters] if letters and self.table != "output" else []
        if not named:
            raise SettingsError(f"the sink of the pipeline has no such table: {self.table}")
        return [(str(uri), options, table_exists(str(uri), options)) for uri in named]


class CompactRequest(_TableRequest):
    """Merge small files of a table. Workers may write meanwhile; no row changes."""

    def run(self, context: OperationContext) -> Effect:
        """Compact the tables."""
        from kcl_pipeline.delta import maintenance  # noqa: PLC0415 (Delta)

        result: list[dict[str, Any]] = []
        lines = []
        for uri, options, exists in self.tables(context):
            if not exists:
                result.append({"table": uri, "exists": False})
                lines.append(f"{uri}: there is no table; the first batch creates it")
            elif self.dry_run:
                small = maintenance.small_files(uri, options)
                result.append({"table": uri, "files": small.files, "bytes": small.bytes})
                files = f"{counted(small.files, 'file')} ({small.bytes:,} bytes)"
                lines.append(f"{uri}: dry run: would merge up to {files}")
            else:
                done = maintenance.compact(uri, options)
                removed, added = done.files_removed, done.files_added
                result.append({"table": uri, "removed": removed, "added": added})
                lines.append(f"{uri}: merged {counted(removed, 'file')} into {added}")
        return Effect({"dry_run": self.dry_run, "tables": result}, lines)


class VacuumRequest(_TableRequest):
    """Remove files that no recent version of a table uses.

    Files of batches that are not committed yet are protected by their age, so the retention must be
    longer than any pause of a worker, and than any query.
    """

    retention_hours: int = Field(
        168, ge=1, description="Remove files that no version of the last so many hours uses"
    )

    def run(self, context: OperationContext) -> Effect:
        """Vacuum the tables."""
        from kcl_pipeline.delta import maintenance  # noqa: PLC0415 (Delta)

        result: list[dict[str, Any]] = []
        lines = []
        verb = "dry run: would remove" if self.dry_run else "removed"
        for uri, options, exists in self.tables(context):
            if not exists:
                result.append({"table": uri, "exists": False})
                lines.append(f"{uri}: there is no table; the first batch creates it")
                continue
            done = maintenance.measured_vacuum(
                uri, self.retention_hours, options, dry_run=self.dry_run
            )
            lines.append(
                f"{uri}: {verb} {counted(len(done.files), 'file')} ({done.bytes:,} bytes) that no "
                f"version of the last {done.retention_hours} hours uses"
            )
            if self.dry_run:
                lines += [f"  {path}" for path in done.files[:MOST_FILES]]
            if self.dry_run and len(done.files) > MOST_FILES:
                lines.append(f"  and {len(done.files) - MOST_FILES} more")
            result.append(
                {
                    "table": uri,
                    "files": len(done.files),
                    "bytes": done.bytes,
                    "retention_hours": done.retention_hours,
                    "paths": list(done.files),
                }
            )
        return Effect({"dry_run": self.dry_run, "tables": result}, lines)


class SeekRequest(OperationRequest):
    """Set the positions of an application, a stream or a shard.

    Without `yes`, it only shows the changes. After a seek back, each record of the range lands in
    the table once more. A seek forward skips records. It is refused while a worker holds a lease,
    unless it pauses the application.
    """

    to: str | None = Field(
        None, description="TRIM_HORIZON, LATEST, or a time such as 2026-11-23T09:00:00Z"
    )
    ago: str | None = Field(None, description="A time before now, such as 90s, 10m, 2h or 1d")
    after: str | None = Field(
        None, description="Sequence number of a record; the next one is read first"
    )
    only_stream: str | None = Field(None, description="Name or ARN. Default: all streams")
    shards: list[str] = Field(
        default=[],
        description="Shard id or lease key; repeat per shard. Default: all",
        json_schema_extra=_option("--shard"),
    )
    yes: bool = Field(False, description="Write. Without it, the changes are only shown")
    pause: bool = Field(
        False, description="Pause the application for the seek, and resume it after"
    )
    wait_seconds: float = Field(120.0, ge=0, description=_WAIT, json_schema_extra=_option("--wait"))

    def run(self, context: OperationContext) -> Effect:
        """Seek, or show what a seek would change."""
        from kcl_pipeline.aws import open_kinesis  # noqa: PLC0415 (AWS only here)
        from kcl_pipeline.control import seek  # noqa: PLC0415 (it needs pyarrow)

        app = context.control
        target = seek.seek_target(self.to, self.ago, self.after, app.clock.wall())
        seeking = seek.Seeking(
            app,
            open_kinesis(app.settings, context.clients(app.settings), app.clock),
            target,
            stream=self.only_stream,
            shards=self.shards,
            sink=seek.position_sink(context.sink, app.name),
        )
        if not self.yes:
            plan = seeking.plan()
            changes = seek.changes_as_dicts(plan.changes)
            result = {"dry_run": True, "changes": changes, "held": dict(plan.held)}
            return Effect(result, [f"positions at {target}", *seek.plan_sentences(plan)])
        done = seeking.write(str(uuid4()), pause=self.pause, wait_seconds=self.wait_seconds)
        result = {
            "dry_run": False,
            "changes": seek.changes_as_dicts(done.written),
            "refused": list(done.refused),
            "is_paused": done.is_paused,
        }
        sentences = [f"positions at {target}", *seek.sentences(done)]
        return Effect(result, sentences, not done.refused)


class ReplayRequest(OperationRequest):
    """Replay a time range, or dead letters, into a side table or the table of the pipeline.

    Each record of the range lands exactly once more. The workers of the pipeline go on. If it is
    not complete, continue it with its id. The replay of a time range is an application of its own,
    with its own tables, which are deleted at its end. To continue that of dead letters, write its
    other options once more, too.
    """

    needs_pipeline: ClassVar[bool] = True
    from_time: str | None = Field(
        None,
        description="First arrival time (inclusive), such as 2026-11-23T09:00:00Z, or a time "
        "before now, such as 10m. Of dead letters: first time of a failure",
        json_schema_extra=_option("--from"),
    )
    to_time: str | None = Field(
        None,
        description="Last arrival time (exclusive), likewise. Default: now",
        json_schema_extra=_option("--to"),
    )
    into: str | None = Field(None, description="Address of a side table. It is created")
    in_place: bool = Field(
        False, description="Write to the table of the pipeline: rows are repeated"
    )
    only_stream: str | None = Field(None, description="Name or ARN. Default: all streams")
    dead_letters: bool = Field(
        False,
        description="Replay the dead letters that are not marked as replayed. In place marks them",
    )
    replay_id: str | None = Field(
        None,
        description="Identity of the replay. With the id of one that is not complete, it is "
        "continued; of a time range, the other options are then not needed. Default: drawn",
        json_schema_extra=_option("--id"),
    )
    dry_run: bool = Field(False, description=_DRY_RUN)
    progress_seconds: float = Field(
        10.0, ge=0.1, description="Seconds between two lines with progress counters"
    )

    def run(self, context: OperationContext) -> Effect:
        """Replay, or show what a replay would do."""
        from kcl_pipeline.control import replay  # noqa: PLC0415 (AWS only here)

        request = self.model_copy(update={"replay_id": self.replay_id or context.default_id})
        replaying: replay.LettersReplay | replay.RangeReplay
        if self.dead_letters:
            replaying = replay.LettersReplay(context, SystemRandom())
        else:
            replaying = replay.RangeReplay(context)
        plan = replaying.plan(request)
        if self.dry_run:
            if isinstance(replaying, replay.RangeReplay):
                plan = replaying.with_shards(plan)
            lines = replay.plan_sentences(plan, dry_run=True)
            return Effect({"dry_run": True, **replay.plan_as_dict(plan)}, lines)
        for line in replay.plan_sentences(plan):
            context.say(line)
        done = replaying.run(plan, self.progress_seconds)
        result = {"dry_run": False, **replay.as_dict(done)}
        return Effect(result, replay.sentences(done), done.is_complete)


class RetireRequest(OperationRequest):
    """End an application: delete its tables, its announcements and its fan-out consumers.

    Without its name it only shows what would be deleted. It is refused while a worker or a leader
    is alive. The output table, the dead letters and the streams stay.
    """

    confirm: str = Field(
        "", description="Name of the application: delete. Without it, only show what would go"
    )

    def run(self, context: OperationContext) -> Effect:
        """Retire it, or show what would be deleted."""
        from kcl_pipeline.aws import open_removals  # noqa: PLC0415 (AWS only here)
        from kcl_pipeline.control import retire  # noqa: PLC0415 (likewise)

        app = context.control
        removals = open_removals(app.settings, context.clients(app.settings), app.clock)
        streams = tuple(name for name in app.settings.streams if name != "-")
        text = "observing the rows of workers and leader for {:.0f} s"
        retiring = retire.Retiring(
            app, removals, context.sink, streams, lambda seconds: context.say(text.format(seconds))
        )
        if not self.confirm:
            plan = retiring.plan()
            hint = f"dry run; confirm with the name {app.name} to delete"
            lines = [*retire.plan_sentences(plan), hint]
            return Effect({"dry_run": True, **retire.plan_as_dict(plan)}, lines)
        done = retiring.retire(self.confirm)
        result = {"dry_run": False, **retire.as_dict(done)}
        return Effect(result, retire.sentences(done), done.is_complete)


class AcceptRequest(OperationRequest):
    """Record the streams or the sink of the settings, if they differ from the recorded ones.

    No worker may run. With `streams` all leases, and so all positions, are deleted, except when a
    list of several streams changes to another such list. With `sink` they are kept. Without both,
    it shows the record and how the settings differ.
    """

    streams: bool = Field(False, description="Record the streams of the settings")
    sink: bool = Field(False, description="Record the sink of the pipeline")

    def run(self, context: OperationContext) -> Effect:
        """Accept what the settings have."""
        from kcl_pipeline.control.accepting import accept  # noqa: PLC0415 (AWS only here)

        return accept(context, streams=self.streams, sink=self.sink)


class AcknowledgeRequest(OperationRequest):
    """Acknowledge the recorded losses: the check `no_records_lost` passes until the next one."""

    def run(self, context: OperationContext) -> Effect:
        """Store the number of losses that is recorded now."""
        from kcl_pipeline.leases.application import Losses  # noqa: PLC0415 (for --help)

        table = context.control.coordinator
        shown = table.read_losses()
        millis = int(context.control.clock.wall() * 1000)
        record = table.change_losses(
            partial(Losses.with_acknowledged, shown=shown, now_millis=millis)
        )
        lines = [shown.sentence, f"{record.acknowledged} of {record.count} acknowledged"]
        fields = msgspec.to_builtins(record)
        return Effect({**fields, "unacknowledged": record.unacknowledged}, lines)


OPERATIONS: Final[Mapping[str, type[OperationRequest]]] = {
    "pause": PauseRequest,
    "resume": ResumeRequest,
    "drain": DrainRequest,
    "compact": CompactRequest,
    "vacuum": VacuumRequest,
    "seek": SeekRequest,
    "replay": ReplayRequest,
    "retire": RetireRequest,
    "accept": AcceptRequest,
    "acknowledge": AcknowledgeRequest,
}
"""The operations by name."""
