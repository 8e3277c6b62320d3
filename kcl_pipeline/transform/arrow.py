"""Call an Arrow transform: a function from a `pyarrow.Table` to a `pyarrow.Table`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from kcl_pipeline.errors import BrokenTransformError, KclError, TransformFailedError
from kcl_pipeline.transform.errors import error_line

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
) -> list[str | None]:
    """Call the function on each part. Returns its error or None (see `BatchWriter.probe`).

    Args:
        transform: The function.
        slices: Parts of a batch.
        check: Gets the result of a part, and raises `TransformFailedError` if it cannot be written.
    """
    return [_error_on(transform, part, check) for part in slices]


def _error_on(
    transform: ArrowTransform | None, records: pa.Table, check: Callable[[pa.Table], object]
) -> str | None:
    try:
        check(apply_arrow_transform(transform, records))
    except TransformFailedError as error:
        return error.detail
    return None
