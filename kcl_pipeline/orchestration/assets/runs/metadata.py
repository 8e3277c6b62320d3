"""Convert a worker's counters to Dagster metadata.

Dagster plots numbers. Only values that add up over periods and runs are numbers. A value of one
worker or one moment is text or a table, because several workers materialize the same asset and
their values would alternate in the plot.
"""

from collections.abc import Mapping
from typing import Any, Final

import dagster as dg

from kcl_pipeline.text import counted
from kcl_pipeline.worker.summary import WorkerProgress, WorkerSummary

MAX_ROWS: Final = 50
ADDITIVE: Final = (
    "records",
    "bytes",
    "rows_written",
    "batches",
    "dead_letters",
    "refused_batches",
    "handoffs",
)
"""The counters of a worker that add up over periods and workers."""


def known(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata without values that are None."""
    return {name: value for name, value in metadata.items() if value is not None}


def lag_text(millis: int | None) -> str:
    """A lag as text."""
    return "unknown" if millis is None else f"{millis / 1000:.1f} s"


def table_of(
    rows: list[dict[str, Any]], most: int = MAX_ROWS
) -> dg.TableMetadataValue | dg.TextMetadataValue:
    """Convert the first rows to a metadata table, or to the text "none" without rows.

    Values are strings and numbers; None becomes an empty cell.
    """
    if not rows:
        return dg.MetadataValue.text("none")
    records = [
        dg.TableRecord({key: "" if value is None else value for key, value in row.items()})
        for row in rows[:most]
    ]
    columns = [dg.TableColumn(name, _type_of(rows, name)) for name in rows[0]]
    return dg.MetadataValue.table(records, dg.TableSchema(columns))


def _type_of(rows: list[dict[str, Any]], name: str) -> str:
    values = [row[name] for row in rows]
    if all(isinstance(v, int) for v in values):
        return "int"
    return "float" if all(isinstance(v, int | float) for v in values) else "string"


def period_text(progress: WorkerProgress) -> str:
    """One reporting period of one worker as a sentence."""
    unknown = len(progress.lag_unknown)
    parts = [
        f"{counted(progress.records, 'record')} in {progress.seconds:.0f} s",
        f"lag {lag_text(progress.lag_millis)}"
        + (f" (of {counted(unknown, 'shard')} not known yet)" if unknown else ""),
        *(f"{key} does not advance: {step}" for key, step in sorted(progress.stalled.items())),
        *(f"{key} is paused: {why}" for key, why in sorted(progress.paused.items())),
    ]
    return "; ".join(parts)


def _text(value: object) -> dg.TextMetadataValue | None:
    return None if value is None else dg.MetadataValue.text(str(value))


def final_metadata(
    summary: WorkerSummary, last: WorkerProgress | None, *, sensor_counts: bool
) -> dict[str, Any]:
    """Metadata of a worker that has stopped.

    The totals of the run are text; `run_records` and `run_handoffs` are also numbers, one per run.

    Args:
        summary: The summary.
        last: The last report.
        sensor_counts: Whether the reports of the sensor have the counters of this worker. If not,
            they are numbers here, too.
    """
    total = summary.total
    positions = total.positions or (last.positions if last else {})
    version = (
        total.table_version
        if total.table_version is not None
        else (last.table_version if last else None)
    )
    metadata = {
        "rows" if name == "rows_written" else name: getattr(total, name)
        for name in (() if sensor_counts else ADDITIVE)
    } | {
        "run_records": total.records,
        "run_handoffs": total.handoffs,
        "worker": dg.MetadataValue.text(total.worker_id),
        "stopped": dg.MetadataValue.text(str(summary.reason)),
        "whole_run": dg.MetadataValue.text(
            f"{counted(total.records, 'record')}, {counted(total.bytes, 'byte')}, "
            f"{counted(total.rows_written, 'row')}, {counted(total.batches, 'batch', 'batches')}, "
            f"{counted(total.dead_letters, 'dead letter')}, {counted(total.handoffs, 'handoff')} "
            f"in {total.seconds:.0f} s"
        ),
        "positions": table_of(
            [{"lease": key, "position": positions[key]} for key in sorted(positions)]
        ),
        "left_to_others": _text(summary.elsewhere_sentence),
        "table_version": _text(version),
    }
    return known(metadata)
