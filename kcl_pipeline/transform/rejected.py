"""Separate the rows that a transform rejects: those with a string in the column `_error`.

A rejected row contains the position of its record, so that the dead letter is the record as it was
read: the columns `shard_id`, `sequence_number` and `sub_sequence_number`, and `stream` with several
streams. With a leading underscore (`_shard_id`) they are not written to the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
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
    """The output columns with the error and the position of a rejected row.

    Attributes:
        positions: By column of `REJECTED_SCHEMA`, the output column, if it exists.
        dropped: Output columns that are not written to the table.
    """

    positions: dict[str, str]
    dropped: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """All output columns that describe rejected rows."""
        return (ERROR_COLUMN, *self.positions.values())


def rejected_columns(schema: pa.Schema) -> RejectedColumns | None:
    """Find the columns that describe rejected rows; None without `_error`.

    The check applies to the first batch, also without rejected rows.

    Raises:
        BrokenTransformError: The columns do not identify the records of rejected rows.
    """
    names = schema.names
    if ERROR_COLUMN not in names:
        return None
    positions = {
        name: f"_{name}" if f"_{name}" in names else name
        for name in (_STREAM, *_POSITION)
        if name in names or f"_{name}" in names
    }
    missing = [name for name in _POSITION if name not in positions]
    if missing:
        raise BrokenTransformError(
            f"the transform returns {ERROR_COLUMN} without {', '.join(missing)}; return these "
            "columns of the records too, with a leading underscore "
            f"(_{missing[0]}) to keep them out of the table"
        )
    for name, column in {**positions, "error": ERROR_COLUMN}.items():
        kind, required = schema.field(column).type, REJECTED_SCHEMA.field(name).type
        if not _fits(kind, required):
            raise BrokenTransformError(
                f"the transform returns {column} as {kind}; return it as {required}"
            )
    hidden = [f"_{name}" for name in (_STREAM, *_POSITION) if f"_{name}" in names]
    return RejectedColumns(positions, (ERROR_COLUMN, *hidden))


def split_rejected(output: pa.Table) -> tuple[pa.Table, pa.Table | None]:
    """Split an output into the rows for the table and the rejected rows.

    Returns:
        The rows for the table, and the rejected rows with `REJECTED_SCHEMA` (None without any).

    Raises:
        BrokenTransformError: As in `rejected_columns`.
    """
    columns = rejected_columns(output.schema)
    if columns is None:
        return output, None
    kept = output.drop_columns(list(columns.dropped))
    errors = output.column(ERROR_COLUMN)
    if errors.null_count == len(errors):
        return kept, None
    is_rejected = pc.is_valid(errors)
    try:
        found = [
            _plain(output.column(columns.positions[field.name]))
            .filter(is_rejected)
            .cast(field.type)
            if field.name in columns.positions
            else pa.nulls(len(errors) - errors.null_count, field.type)
            for field in REJECTED_SCHEMA
            if field.name != "error"
        ]
        texts = pa.array(_texts(_plain(errors).filter(is_rejected)), pa.string())
        table = pa.Table.from_arrays([*found, texts], schema=REJECTED_SCHEMA)
        table.validate(full=True)
    except pa.ArrowException as error:
        raise BrokenTransformError(
            f"the transform returns {ERROR_COLUMN} with position columns that are not those of "
            f"records: {with_frame(str(error), None)}"
        ) from error
    return _filtered(kept, pc.invert(is_rejected)), table


def _filtered(table: pa.Table, chosen: pa.ChunkedArray) -> pa.Table:
    """The chosen rows, of all types: pyarrow does not filter views."""
    try:
        return table.filter(chosen)
    except pa.ArrowNotImplementedError:
        edges = np.flatnonzero(np.diff(chosen.to_numpy().astype(np.int8), prepend=0, append=0))
        pairs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        parts = [table.slice(begin, end - begin) for begin, end in pairs]
        return pa.concat_tables(parts) if parts else table.slice(0, 0)


def _texts(errors: pa.ChunkedArray) -> list[str]:
    """The errors as printable lines. They may quote bytes of a record that are not UTF-8."""
    return [
        with_frame(text.decode(errors="backslashreplace"), None)
        for text in errors.cast(pa.binary()).to_pylist()
    ]


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values without a dictionary, and without the layout of views."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return pa.chunked_array(
            [_plain_chunk(chunk.dictionary).take(chunk.indices) for chunk in column.chunks],
            _plain_chunk(pa.array([], kind.value_type)).type,
        )
    chunks = [_plain_chunk(chunk) for chunk in column.chunks]
    return pa.chunked_array(chunks, chunks[0].type if chunks else kind)


def _plain_chunk(chunk: pa.Array) -> pa.Array:
    if pa.types.is_string_view(chunk.type):
        return chunk.cast(pa.binary_view()).cast(pa.binary())
    return chunk


def _fits(kind: pa.DataType, required: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _fits(kind.value_type, required)
    if pa.types.is_integer(required):
        return bool(pa.types.is_integer(kind) or pa.types.is_null(kind))
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_null(kind)
    )
