"""Check the record of lost records."""

from kcl_pipeline.cli.doctor.finding import Finding, ok, problem
from kcl_pipeline.errors import UnreadableRowError
from kcl_pipeline.leases.application.losses import Loss, LossLog, time_text
from kcl_pipeline.leases.tables import CoordinatorStateTable
from kcl_pipeline.text import counted, printable

_SUBJECT = "lost records"
_SHOWN = 3


def check_losses(table: CoordinatorStateTable, options: str) -> Finding:
    """Check that every loss of records is acknowledged.

    Args:
        table: The coordinator-state table.
        options: How the user named the application, for the command in the advice.
    """
    try:
        found = table.read_losses().log
    except UnreadableRowError as error:
        return problem(_SUBJECT, str(error), "check the attribute and remove it")
    if found.unacknowledged:
        return problem(
            _SUBJECT,
            _text(found),
            "see docs/operations.md, repair the output if the producer still has the records, and "
            f"acknowledge: kcl-pipeline losses {options} --acknowledge",
        )
    if found.acknowledged:
        return ok(_SUBJECT, f"{counted(found.acknowledged, 'loss', 'losses')}, all acknowledged")
    return ok(_SUBJECT, "no loss is recorded")


def _text(found: LossLog) -> str:
    newest = [_loss_text(loss) for loss in found.waiting[: -_SHOWN - 1 : -1]]
    rest = found.unacknowledged - len(newest)
    text = f"{counted(found.unacknowledged, 'loss', 'losses')} of records not acknowledged"
    text += f": {'; '.join(newest)}" if newest else ""
    return text + (f"; and {rest} more" if newest and rest else "")


def _loss_text(loss: Loss) -> str:
    ends = [
        f"{name} {printable(value)}"
        for name, value in (("after", loss.after), ("until", loss.until), ("before", loss.before))
        if value is not None
    ]
    what = " ".join([str(loss.reason), *ends])
    return (
        f"{printable(loss.label)} ({what}), recorded "
        f"{time_text(loss.recorded_millis)} by {printable(loss.reporter)}"
    )
