"""Evaluate the check `no_records_lost`."""

from typing import Any, Final

import dagster as dg

from kcl_pipeline.errors import UnreadableRowError
from kcl_pipeline.leases.application.losses import Loss, LossLog, time_text
from kcl_pipeline.leases.tables import CoordinatorStateTable
from kcl_pipeline.orchestration.assets.checks.health import Health
from kcl_pipeline.orchestration.assets.runs.metadata import table_of
from kcl_pipeline.text import counted, printable

LOSSES: Final = "no_records_lost"
ADVICE: Final = (
    "See docs/operations.md, then acknowledge: kcl-pipeline losses -a APPLICATION --acknowledge"
)


def observe_losses(table: CoordinatorStateTable) -> LossLog | UnreadableRowError:
    """Return the recorded losses, or why they cannot be read."""
    try:
        return table.read_losses().log
    except UnreadableRowError as error:
        return error


def records_lost(found: LossLog | UnreadableRowError) -> Health:
    """Whether no records were lost, or all losses are acknowledged."""
    severity = dg.AssetCheckSeverity.ERROR
    if isinstance(found, UnreadableRowError):
        return Health(LOSSES, False, str(found), severity)
    listed = [_row(loss) for loss in reversed(found.waiting)]
    return Health(
        LOSSES,
        not found.unacknowledged,
        _description(found),
        severity,
        {
            "unacknowledged": found.unacknowledged,
            "acknowledged": found.acknowledged,
            "losses": table_of(listed),
        },
    )


def _description(found: LossLog) -> str:
    if found.unacknowledged:
        text = f"{counted(found.unacknowledged, 'loss', 'losses')} of records not acknowledged"
        if found.waiting:
            last = found.waiting[-1]
            text += f"; the last: {last.sentence or f'{printable(last.lease_key)}, {last.reason}'}"
        return f"{text}. {ADVICE}"
    if found.acknowledged_millis is None:
        return "no loss of records is recorded"
    return (
        f"{counted(found.acknowledged, 'loss', 'losses')} of records acknowledged, the last at "
        f"{time_text(found.acknowledged_millis)}"
    )


def _row(loss: Loss) -> dict[str, Any]:
    return {
        "stream": printable(loss.stream or ""),
        "shard": printable(loss.shard_id),
        "reason": str(loss.reason),
        "after": printable(loss.after or ""),
        "until": printable(loss.until or ""),
        "before": printable(loss.before or ""),
        "first arrival": time_text(loss.first_arrival_millis),
        "last arrival": time_text(loss.last_arrival_millis),
        "recorded": time_text(loss.recorded_millis),
        "reporter": printable(loss.reporter),
    }
