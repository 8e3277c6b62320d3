"""Evaluate the check `no_records_lost`."""

from typing import Final

import dagster as dg

from kcl_pipeline.errors import UnreadableRowError
from kcl_pipeline.leases.application.losses import Losses
from kcl_pipeline.leases.tables import CoordinatorStateTable
from kcl_pipeline.orchestration.assets.checks.health import Health

LOSSES: Final = "no_records_lost"
ADVICE: Final = (
    "See docs/operations.md, then acknowledge: kcl-pipeline losses -a APPLICATION --acknowledge"
)


def observe_losses(table: CoordinatorStateTable) -> Losses | UnreadableRowError:
    """Return the recorded losses, or why they cannot be read."""
    try:
        return table.read_losses()
    except UnreadableRowError as error:
        return error


def records_lost(losses: Losses | UnreadableRowError) -> Health:
    """Whether no records were lost, or all losses are acknowledged."""
    severity = dg.AssetCheckSeverity.ERROR
    if isinstance(losses, UnreadableRowError):
        return Health(LOSSES, False, str(losses), severity)
    passed = not losses.unacknowledged
    text = losses.sentence if passed else f"{losses.sentence}. {ADVICE}"
    counts = {"losses": losses.count, "acknowledged": losses.acknowledged}
    return Health(LOSSES, passed, text, severity, counts)
