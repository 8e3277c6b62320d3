"""Rows that a transform hands back as dead letters: those with a text in the column `_error`.

Such a row carries the position of its record, so that the dead letter is the record as it was read:
the columns `shard_id`, `sequence_number` and `sub_sequence_number`, and `stream` where there are
several. With a leading underscore (`_shard_id`) they are not columns of the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from kcl_pipeline.batch import REJECTED_SCHEMA
from kcl_pipeline.errors import BrokenTransformError
from kcl_pipeline.transform.errors import with_frame

ERROR_COLUMN: Final = "_error"
_POSITION: Final = ("shard_id", "sequence_number", "sub_sequence_number")
_STREAM: Final = "stream"


@dataclass(frozen=True, slots=True)
class RejectedColumns:
    """Where an output has the error and the position of a rejected row.

    Attributes:
        positions: Output column for each column of `REJECTED_SCHEMA` that is there.
        dropped: Columns that are not columns of the table.
    """

    positions: dict[str, str]
    dropped: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """All output columns that say something about rejected rows."""
        return (ERROR_COLUMN, *self.positions.values())


def rejected_columns(schema: pa.Schema) -> RejectedColumns | None:
    """What an output with these columns says about rejected rows; None without `_error`.

    Raises `BrokenTransformError` when rejected rows could not be traced to their records: at the
    first batch, not at the first bad record.
    """
    names = schema.names
    if ERROR_COLUMN not in names:
        return None
    positions = {
        name: f"_{name}" if f"_{name}" in names else name
        for name in (_STREAM, *_POSITION)
        if name in names or f"_{name}" in names
    }
    lacking = [name for name in _POSITION if name not in positions]
    if lacking:
        raise BrokenTransformError(
            f"the transform returns {ERROR_COLUMN} without {', '.join(lacking)}; return these "
            "columns of the records too, or, to keep them out of the table, with a leading "
            f"underscore (_{lacking[0]})"
        )
    for name, wanted in {**positions, "error": ERROR_COLUMN}.items():
        kind, must = schema.field(wanted).type, REJECTED_SCHEMA.field(name).type
        if not _fits(kind, must):
            raise BrokenTransformError(
                f"the transform returns {wanted} as {kind}; return it as {must}"
            )
    hidden = [f"_{name}" for name in (_STREAM, *_POSITION) if f"_{name}" in names]
    return RejectedColumns(positions, (ERROR_COLUMN, *hidden))


def split_rejected(output: pa.Table) -> tuple[pa.Table, pa.Table | None]:
    """The rows for the table, and the rejected ones with `REJECTED_SCHEMA` (None: there are none).

    Raises `BrokenTransformError` as `rejected_columns` does.
    """
    columns = rejected_columns(output.schema)
    if columns is None:
        return output, None
    kept = output.drop_columns(list(columns.dropped))
    errors = output.column(ERROR_COLUMN)
    if errors.null_count == len(errors):
        return kept, None
    is_rejected = pc.is_valid(errors)
    rejected = output.filter(is_rejected)
    found = [
        rejected.column(columns.positions[field.name]).cast(field.type)
        if field.name in columns.positions
        else pa.nulls(rejected.num_rows, field.type)
        for field in REJECTED_SCHEMA
        if field.name != "error"
    ]
    texts = [with_frame(str(text), None) for text in rejected.column(ERROR_COLUMN).to_pylist()]
    table = pa.Table.from_arrays([*found, pa.array(texts, pa.string())], schema=REJECTED_SCHEMA)
    return kept.filter(pc.invert(is_rejected)), table


def _fits(kind: pa.DataType, must: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _fits(kind.value_type, must)
    if pa.types.is_null(kind):
        return True
    if pa.types.is_integer(must):
        return bool(pa.types.is_integer(kind))
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )
