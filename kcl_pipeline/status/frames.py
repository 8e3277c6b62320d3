"""The tables of leases and workers as pandas DataFrames, for a notebook and for `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Final

from kcl_pipeline.status.rows import LeaseRow, WorkerRow, lease_rows, worker_rows
from kcl_pipeline.status.snapshot import Snapshot

if TYPE_CHECKING:
    import pandas as pd

_TYPES: Final = {
    "int": "int64",
    "int | None": "Int64",
    "float": "float64",
    "float | None": "float64",
    "bool": "bool",
}
"""The type of a column, by the annotation of the field. Others are objects."""


def lease_frame(snapshot: Snapshot) -> pd.DataFrame:
    """Return one row per lease, with the fields of `LeaseRow`: what needs attention first."""
    return _frame(LeaseRow, lease_rows(snapshot))


def worker_frame(snapshot: Snapshot, separator: str) -> pd.DataFrame:
    """Return one row per worker, with the fields of `WorkerRow`, sorted by id."""
    return _frame(WorkerRow, worker_rows(snapshot, separator))


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows as dictionaries. A number that is not known is None."""
    plain = frame.astype(object)
    rows = plain.where(plain.notna(), None).to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in rows]


def _frame(kind: type[Any], rows: Sequence[LeaseRow | WorkerRow]) -> pd.DataFrame:
    import pandas as pd  # noqa: PLC0415 (it takes half a second, and few processes need it)

    types = {one.name: _TYPES.get(str(one.type), "object") for one in fields(kind)}
    frame = pd.DataFrame([asdict(row) for row in rows], columns=list(types), dtype=object)
    return frame.astype(types)
