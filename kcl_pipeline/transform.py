"""Call the user's transform, and handle its rejected rows and errors.

An Arrow transform is a function from a `pyarrow.Table` to a `pyarrow.Table`. Rows that it rejects
have a string in the column `_error`. An error that it raises becomes one line with the user's file
and line number.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kcl_pipeline.batch import REJECTED_SCHEMA, PartFailure
from kcl_pipeline.errors import BrokenTransformError, KclError, TransformFailedError
from kcl_pipeline.text import printable

MAX_ERROR_CHARACTERS: Final = 500
"""Longest text of an error.

The text is stored in logs, Dagster's database and the dead-letter table. An exception's message may
contain the payload of a record.
"""

_PACKAGE: Final = str(Path(__file__).parent)
_STANDARD_LIBRARY: Final = tuple(
    {path for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name))}
)
_INSTALLED: Final = re.compile(
    r"(^|[/\\])(site-packages|dist-packages|pyspark\.zip|py4j-[^/\\]*\.zip)([/\\]|$)"
    r"|[/\\]lib[/\\]python\d+(\.\d+)?[/\\]|^<frozen "
)
_SPARK_CLIENT: Final = re.compile(r"(^|[/\\])(pyspark|py4j)([/\\.-]|$)")
_FRAME: Final = re.compile(r'^ *File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)


def error_line(error: BaseException) -> str:
    """The error's type, the first line of its message, and its frame in the user's code.

    At most `MAX_ERROR_CHARACTERS` printable characters.
    """
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    text = type(error).__name__ + (f": {lines[0].strip()}" if lines else "")
    return with_frame(text, frame_of(error.__traceback__))


def with_frame(text: str, frame: str | None) -> str:
    """The first line of `text` and the frame. Only the text is shortened."""
    end = "" if frame is None else f" ({frame})"
    line = text.strip().partition("\n")[0].strip()
    most = MAX_ERROR_CHARACTERS - len(end)
    shown = printable(line, most)
    return (shown if len(shown) <= most else f"{shown[: most - 3]}...") + end


def frame_of(raised_at: TracebackType | None) -> str | None:
    """The innermost frame of the user's code, outside this package and installed packages.

    Without such a frame, the innermost frame outside this package and Spark's client; else None.
    """
    return _innermost(
        [(one.filename, one.lineno or 0, one.name) for one in traceback.extract_tb(raised_at)]
    )


def frame_in(text: str) -> str | None:
    """Like `frame_of`, for the printed traceback of a Python process of Spark."""
    return _innermost([(file, int(line), name) for file, line, name in _FRAME.findall(text)])


def _innermost(frames: list[tuple[str, int, str]]) -> str | None:
    foreign = [
        frame
        for frame in frames
        if not frame[0].startswith(_PACKAGE + os.sep) and not _SPARK_CLIENT.search(frame[0])
    ]
    own = [
        frame
        for frame in foreign
        if not _INSTALLED.search(frame[0]) and not frame[0].startswith(_STANDARD_LIBRARY)
    ]
    if not foreign:
        return None
    file, line, name = (own or foreign)[-1]
    # relative to the working directory if the file is below it
    path = file.removeprefix(os.getcwd() + os.sep)  # noqa: PTH109 (a string is compared)
    return printable(f"{path}:{line} in {name}")


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


ArrowTransform = Callable[[pa.Table], pa.Table]


def apply_arrow_transform(transform: ArrowTransform | None, records: pa.Table) -> pa.Table:
    """Call the user's function; None returns the records unchanged.

    Raises:
        TransformFailedError: The function raised an error.
        BrokenTransformError: The function did not return a table.
    """
    if transform is None:
        return records
    try:
        result = transform(records)
    except KclError:
        raise
    except Exception as error:
        line = error_line(error)
        raise TransformFailedError(
            f"the transform failed on {records.num_rows} records: {line}", detail=line
        ) from error
    if isinstance(result, pa.RecordBatch):
        return pa.Table.from_batches([result])
    if not isinstance(result, pa.Table):
        raise BrokenTransformError(
            f"the transform returned {type(result).__name__}; write a function that returns "
            "a pyarrow.Table"
        )
    return result


def probe_arrow_transform(
    transform: ArrowTransform | None,
    slices: Sequence[pa.Table],
    check: Callable[[pa.Table], object] = lambda _: None,
) -> list[PartFailure | None]:
    """Call the function on each part. Returns its failure or None (see `BatchWriter.probe`).

    Args:
        transform: The function.
        slices: Parts of a batch.
        check: Gets the result of a part, and raises `TransformFailedError` if it cannot be written.
    """
    return [_failure_on(transform, part, check) for part in slices]


def _failure_on(
    transform: ArrowTransform | None, records: pa.Table, check: Callable[[pa.Table], object]
) -> PartFailure | None:
    try:
        check(apply_arrow_transform(transform, records))
    except TransformFailedError as error:
        return PartFailure(error.detail)
    return None
