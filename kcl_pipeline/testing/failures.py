"""Make calls of a worker under test fail, once or from a crash on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from kcl_pipeline.batch import DataFile
from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import KclError, SettingsError, SinkError, UnavailableError
from kcl_pipeline.position import StoredPosition
from kcl_pipeline.sinks.sink import CommitOutcome, Positions, Sink
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis

SINK_CALLS: Final = ("ensure", "positions", "commit", "write_dead_letters")
KINESIS_CALLS: Final = {
    "resolve_stream": "DescribeStreamSummary",
    "list_shards": "ListShards",
    "get_shard_iterator": "GetShardIterator",
    "latest_iterator": "GetShardIterator",
    "get_records": "GetRecords",
}
TABLE_CALLS: Final = (
    "DeleteItem",
    "DescribeTable",
    "GetItem",
    "PutItem",
    "Query",
    "Scan",
    "TransactWriteItems",
    "UpdateItem",
)
OPERATIONS: Final = (*SINK_CALLS, *sorted(set(KINESIS_CALLS.values())), *TABLE_CALLS)


class Failures:
    """The failures that a test planned, shared by all workers of a test."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: Counter[tuple[str, bool]] = Counter()

    def plan(self, operation: str, *, applied: bool) -> None:
        """Let the next call of an operation fail, before or after it has its effect.

        Raises:
            SettingsError: There is no such operation.
        """
        if operation not in OPERATIONS:
            raise SettingsError(
                f"operation={operation!r} is not known. Write one of {', '.join(OPERATIONS)}."
            )
        with self._lock:
            self._planned[operation, applied] += 1

    def take(self, operation: str, *, applied: bool) -> bool:
        """Return whether this call fails."""
        with self._lock:
            if not self._planned[operation, applied]:
                return False
            self._planned[operation, applied] -= 1
            return True


class WorkerProcess:
    """One process under test: after a crash, none of its calls has an effect.

    Attributes:
        crashed: Whether the process has crashed.
    """

    def __init__(
        self, failures: Failures, stop: StopSignal, crash: tuple[str, bool] | None = None
    ) -> None:
        self._failures = failures
        self._stop = stop
        self._crash = crash
        self.crashed = False

    @property
    def can_crash(self) -> bool:
        """Whether a crash is planned."""
        return self._crash is not None

    def before(self, operation: str, _key: str = "") -> None:
        """Called before a call has its effect."""
        self._pass(operation, applied=False)

    def after(self, operation: str, _key: str = "") -> None:
        """Called after a call had its effect and before the caller has the response."""
        self._pass(operation, applied=True)

    def _pass(self, operation: str, *, applied: bool) -> None:
        if not self.crashed and self._crash == (operation, applied):
            self.crashed = True
            self._stop.set()
        if self.crashed or self._failures.take(operation, applied=applied):
            raise _error(operation, crashed=self.crashed)

    def call(self, operation: str, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Make a call with its failures."""
        self.before(operation)
        result = method(*given, **named)
        self.after(operation)
        return result


class FailingKinesis(InMemoryKinesis):
    """The in-memory Kinesis client of a process under test."""

    def __init__(self, base: InMemoryKinesis, process: WorkerProcess) -> None:
        super().__init__(base.model)
        for name, operation in KINESIS_CALLS.items():
            setattr(self, name, _bound(process, operation, getattr(base, name)))


class FailingSink:
    """The sink of a process under test (`Sink`)."""

    def __init__(self, base: Sink, process: WorkerProcess) -> None:
        self._base = base
        self._call = process.call
        self.stores_positions = base.stores_positions

    def ensure(self, schema: pa.Schema) -> None:
        """See `Sink.ensure`."""
        self._call("ensure", self._base.ensure, schema)

    def positions(self, keys: Sequence[str]) -> Positions:
        """See `Sink.positions`."""
        found: Positions = self._call("positions", self._base.positions, keys)
        return found

    def commit(
        self,
        table_id: str | None,
        files: Sequence[DataFile],
        expected: Mapping[str, StoredPosition],
        becomes: Mapping[str, StoredPosition],
        schema: pa.Schema | None = None,
    ) -> CommitOutcome:
        """See `Sink.commit`."""
        outcome: CommitOutcome = self._call(
            "commit", self._base.commit, table_id, files, expected, becomes, schema
        )
        return outcome

    def write_dead_letters(self, records: pa.Table) -> None:
        """See `Sink.write_dead_letters`."""
        self._call("write_dead_letters", self._base.write_dead_letters, records)


def _bound(
    process: WorkerProcess, operation: str, method: Callable[..., Any]
) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        return process.call(operation, method, *given, **named)

    return call


def _error(operation: str, *, crashed: bool) -> KclError:
    why = "the process has crashed" if crashed else "it failed on demand of the test"
    if operation in SINK_CALLS:
        return SinkError(f"{operation}: {why}")
    return UnavailableError(f"{operation}: {why}", operation=operation)
