"""Call a user's function with each batch, **at least once**, and with the identity of the batch.

A worker that dies after the function has returned and before its checkpoint leaves the records to
the next owner of the lease. The next owner calls the function again, and its batches may begin and
end elsewhere. So records repeat, not batches. docs/functions.md has a recipe that is exactly once.

Nothing here needs Spark or Java. `spark.foreach` passes a DataFrame instead of a table.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import pyarrow as pa

from kcl_pipeline.arguments import (
    check_function,
    check_options,
    check_text,
    checked_arguments,
    function_name,
)
from kcl_pipeline.batch import (
    ArrowTransform,
    Batch,
    DataFile,
    PartFailure,
    apply_arrow_transform,
    error_line,
    is_failure,
    probe_arrow_transform,
    split_rejected,
)
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.delta.settings import DeltaSink, check_address
from kcl_pipeline.delta.sink import DeadLetterTable
from kcl_pipeline.delta.storage import StorageOptions
from kcl_pipeline.errors import SinkError, TransformFailedError
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.position import NOTHING_STORED, Position, StoredPosition, check_entries
from kcl_pipeline.settings_errors import names_only, without_credentials
from kcl_pipeline.sinks.sink import CommitOutcome, Positions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FUNCTION: Final = "function"
"""In place of the id of a table."""

Rows = TypeVar("Rows")
"""What the function gets: a pyarrow Table or a Spark DataFrame."""


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The part of one shard whose records a function gets.

    Attributes:
        lease_key: The lease of the shard.
        after: First position (exclusive).
        through: Last position (inclusive).
        rows: Number of records, before the transform.

    Example:
        >>> from kcl_pipeline import BatchIdentity
        >>> def rows_of(identity: BatchIdentity) -> dict[str, int]:
        ...     return {one.lease_key: one.rows for one in identity.ranges}
    """

    lease_key: str
    after: Position
    through: Position
    rows: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class BatchIdentity:
    """The identity of a batch: the ranges that its records come from.

    Example:
        >>> from kcl_pipeline import BatchIdentity
        >>> BatchIdentity(ranges=()).key
        'e3b0c44298fc1c149afbf4c8996fb924'
    """

    ranges: tuple[ShardRange, ...]
    """One per shard, first position exclusive, last one inclusive. The ranges of a shard that this
    worker passes follow each other. Another worker, and this one after a restart, continues after
    the last checkpoint: its ranges may overlap these, and end elsewhere."""

    @property
    def key(self) -> str:
        """A name of 32 hexadecimal digits, the same for the same ranges.

        It can name a file, so that a repeated batch replaces it. It is **not** enough to recognize
        repeated records, because these may come with other ranges.
        """
        text = "\n".join(f"{one.lease_key} {one.after} {one.through}" for one in self.ranges)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@checked_arguments
@dataclass(frozen=True, slots=True)
class ForeachArrowSink:
    """A function that gets each batch as a pyarrow Table, at least once, without Spark and Java.

    Example:
        >>> import pyarrow as pa
        >>> from kcl_pipeline import BatchIdentity, ForeachArrowSink
        >>> def count(rows: pa.Table, identity: BatchIdentity) -> None:
        ...     print(rows.num_rows, "rows of", [one.lease_key for one in identity.ranges])
        >>> sink = ForeachArrowSink(count, dead_letter_uri="lake/dead_letters")

    Raises:
        SettingsError: An argument is invalid.
    """

    function: Callable[[pa.Table, BatchIdentity], object]
    """Gets the rows (the result of `transform_arrow`, or the records) and the identity. It must
    finish its work before it returns. If it raises, the shards of the batch pause, and it is called
    again."""
    dead_letter_uri: str | None = None
    """Delta table for dead letters. Without one, a dead letter pauses its shard."""
    storage_options: Mapping[str, str] = field(default_factory=dict)
    """Options of delta-rs for the dead-letter table."""

    def __post_init__(self) -> None:
        _check(self, "rows", "a function of a pyarrow.Table and a BatchIdentity")

    def __repr__(self) -> str:
        return _shown(self)


@checked_arguments
@dataclass(frozen=True, slots=True)
class ForeachBatchSink:
    """A function that gets each batch as a Spark DataFrame, at least once.

    Example:
        >>> from kcl_pipeline import BatchIdentity, ForeachBatchSink
        >>> def write(frame: object, identity: BatchIdentity) -> None:
        ...     print("a batch", identity.key)
        >>> sink = ForeachBatchSink(write)

    Raises:
        SettingsError: An argument is invalid.
    """

    function: Callable[[DataFrame, BatchIdentity], object]
    """Gets the transformed DataFrame and the identity. It must finish its work before it returns.
    If it raises, the shards of the batch pause, and it is called again."""
    dead_letter_uri: str | None = None
    """Delta table for dead letters. Without one, a dead letter pauses its shard."""
    storage_options: Mapping[str, str] = field(default_factory=dict)
    """Options of delta-rs for the dead-letter table."""

    def __post_init__(self) -> None:
        _check(self, "frame", "a function of a DataFrame and a BatchIdentity")

    def __repr__(self) -> str:
        return _shown(self)


FunctionSink = ForeachArrowSink | ForeachBatchSink


def _check(sink: FunctionSink, argument: str, form: str) -> None:
    name = type(sink).__name__
    check_function(f"{name} function", sink.function, [argument, "identity"], form)
    check_text(
        f"{name} dead_letter_uri",
        sink.dead_letter_uri,
        "Write the address of a Delta table, or None",
        optional=True,
    )
    check_options(
        f"{name} storage_options",
        sink.storage_options,
        "{'AWS_REGION': 'eu-central-1'}",
        hidden=True,
    )
    check_address(f"{name} dead_letter_uri", sink.dead_letter_uri)
    object.__setattr__(sink, "storage_options", StorageOptions(sink.storage_options))


def _shown(sink: FunctionSink) -> str:
    return (
        f"{type(sink).__name__}(function={function_name(sink.function)}, "
        f"dead_letter_uri={without_credentials(sink.dead_letter_uri)!r}, "
        f"storage_options={names_only(sink.storage_options)!r})"
    )


@dataclass(slots=True)
class _Kept(Generic[Rows]):
    """A transformed batch that waits for its commit. `holds` ends what its rows hold."""

    name: str
    rows: Rows
    identity: BatchIdentity
    holds: ExitStack
    is_done: bool = False


class FunctionCalls(Generic[Rows]):
    """The `Sink` of a function. A subclass is its `BatchWriter`, too.

    `write` runs the transform and keeps its result, so that failed records are found before the
    function is called by `commit`. No position is stored with what the function writes, so a batch
    that was not checkpointed is processed again.

    Args:
        settings: The sink.
        function: Its function.
        line: Describes an error of the function in one line.
    """

    stores_positions = False

    def __init__(
        self,
        settings: FunctionSink,
        function: Callable[[Rows, BatchIdentity], object],
        line: Callable[[BaseException], str] = error_line,
    ) -> None:
        self._settings = settings
        self._function = function
        self._line = line
        self._dead_letters: DeadLetterTable | None = None
        self._kept: _Kept[Rows] | None = None
        self._written = self._version = 0

    def keep(self, batch: Batch, rows: Rows, count: int, holds: ExitStack) -> DataFile:
        """Keep the result of a transform until its commit, or until the next result.

        Args:
            batch: The batch.
            rows: The result.
            count: Its number of rows.
            holds: Is closed when the result is not needed any more.

        Returns:
            A placeholder for `Batch.files`.
        """
        self._drop()
        self._written += 1
        name = f"kept/{self._written}"
        ranges = tuple(
            ShardRange(chunk.lease_key, chunk.after, chunk.through, chunk.record_count)
            for chunk in batch.ranges
        )
        self._kept = _Kept(name, rows, BatchIdentity(ranges), holds)
        return DataFile(name, batch.records.nbytes, count)

    def ensure(self, schema: pa.Schema) -> None:
        """Do nothing: the function has its own store."""

    def positions(self, keys: Sequence[str]) -> Positions:
        """Return nothing: the worker knows what it has committed since it took a lease."""
        return Positions(_FUNCTION, dict.fromkeys(keys, NOTHING_STORED))

    def commit(
        self,
        table_id: str | None,  # noqa: ARG002 (there is one function)
        files: Sequence[DataFile],
        expected: Mapping[str, StoredPosition],
        becomes: Mapping[str, StoredPosition],
        schema: pa.Schema | None = None,  # noqa: ARG002 (there is no table)
    ) -> CommitOutcome:
        """Call the function with the rows, if there are any.

        Raises:
            TransformFailedError: The function raised an error. It may have written the rows.
            SinkError: The result was dropped. It must be written again.
        """
        check_entries(expected, becomes)
        if files:
            self._call(files[0].path)
        self._version += 1
        return CommitOutcome(self._version)

    def _call(self, name: str) -> None:
        kept = self._kept
        if kept is None or kept.name != name:
            raise SinkError("the result of the batch was dropped; it must be written again")
        if kept.is_done:  # The call is repeated because its answer was lost in this process.
            return
        try:
            self._function(kept.rows, kept.identity)
        except BaseException as error:
            if not is_failure(error):
                raise
            line = self._line(error)
            raise TransformFailedError(
                f"the function of the sink failed: {line}", detail=line
            ) from error
        kept.is_done = True
        kept.holds.close()

    def _drop(self) -> None:
        if self._kept is not None:
            self._kept.holds.close()
        self._kept = None

    def write_dead_letters(self, records: pa.Table) -> None:
        """Append failed records to the dead-letter table.

        Raises:
            SinkError: The sink has no dead-letter table, or it cannot be written now.
        """
        settings = self._settings
        if settings.dead_letter_uri is None:
            raise SinkError(
                f"{records.num_rows} records failed and {type(settings).__name__} has no "
                "dead_letter_uri; name one, or set failed_records to skip or fail"
            )
        if self._dead_letters is None:
            table = DeltaSink(settings.dead_letter_uri, storage_options=settings.storage_options)
            self._dead_letters = DeadLetterTable(table, SystemClock(), random.SystemRandom())
        self._dead_letters.append(records)


class ForeachArrow(FunctionCalls[pa.Table]):
    """Both the `BatchWriter` and the `Sink` of a `ForeachArrowSink`.

    Args:
        sink: The settings.
        transform_arrow: Gets the records and returns a table; None passes the records unchanged.
        memory: Counts the result until the function has returned. None: it is not counted.
    """

    def __init__(
        self,
        sink: ForeachArrowSink,
        transform_arrow: ArrowTransform | None = None,
        memory: MemoryBudget | None = None,
    ) -> None:
        super().__init__(sink, sink.function)
        self._transform = transform_arrow
        self._memory = memory

    def write(self, batch: Batch) -> Batch:
        """Transform, and keep the result for `commit` (see `BatchWriter.write`)."""
        if not batch.records.num_rows:
            return replace(batch, files=())
        rows, rejected = split_rejected(apply_arrow_transform(self._transform, batch.records))
        if not rows.num_rows:
            return replace(batch, files=(), rejected=rejected)
        holds = ExitStack()
        # The records themselves are counted already. A result may share their buffers.
        if self._memory is not None and self._transform is not None:
            holds.enter_context(self._memory.counting("result", rows.nbytes))
        file = self.keep(batch, rows, rows.num_rows, holds)
        return replace(batch, files=(file,), output_schema=rows.schema, rejected=rejected)

    def probe(self, slices: Sequence[pa.Table]) -> list[PartFailure | None]:
        """Call the transform on each part in turn (see `BatchWriter.probe`)."""
        return probe_arrow_transform(self._transform, slices, split_rejected)
