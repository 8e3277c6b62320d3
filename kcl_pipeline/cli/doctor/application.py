"""Check what is recorded of the application: its streams and sink, its pause, and lost records."""

from collections.abc import Sequence

from kcl_pipeline.cli.doctor.finding import Finding, ok, problem, warning
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import OtherApplicationError, UnreadableRowError
from kcl_pipeline.leases.application.identity import ApplicationIdentity, successor
from kcl_pipeline.leases.tables import CoordinatorStateTable
from kcl_pipeline.shards import StreamId

_LOSSES = "lost records"


def check_application(
    table: CoordinatorStateTable, settings: ConsumerSettings, streams: Sequence[StreamId]
) -> Finding:
    """Check that the recorded streams are those of the settings."""
    subject = "application"
    try:
        record = table.read_application()
        if record is None:
            return ok(subject, "its streams are not recorded yet; the first start records them")
        if len(streams) == len(settings.streams):
            configured = ApplicationIdentity.of(streams, is_multi_stream=settings.is_multi_stream)
            successor(settings.application_name, record.identity, configured)
    except (OtherApplicationError, UnreadableRowError) as error:
        return problem(subject, str(error), "show the record with `kcl-pipeline application`")
    names = ", ".join(stream.name for stream in record.identity.streams)
    return ok(subject, f"reads {names}, writes to {record.identity.sink or 'no recorded sink'}")


def check_pause(table: CoordinatorStateTable, named: str) -> Finding:
    """Check whether an operator has paused the application."""
    pause = table.read_control().pause
    if pause is None:
        return ok("pause", "none: workers may run")
    return warning(
        "pause", pause.sentence, f"nothing is read; `kcl-pipeline resume {named}` resumes it"
    )


def check_losses(table: CoordinatorStateTable, options: str) -> Finding:
    """Check that every loss of records is acknowledged.

    Args:
        table: The coordinator-state table.
        options: How the user named the application, for the command in the advice.
    """
    try:
        losses = table.read_losses()
    except UnreadableRowError as error:
        return problem(_LOSSES, str(error), "check the attribute and remove it")
    if not losses.unacknowledged:
        return ok(_LOSSES, losses.sentence)
    return problem(
        _LOSSES,
        losses.sentence,
        "see docs/operations.md, repair the output if the producer still has the records, and "
        f"acknowledge: kcl-pipeline losses {options} --acknowledge",
    )
