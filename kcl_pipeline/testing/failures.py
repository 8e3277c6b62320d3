"""Make calls of a worker under test fail, once or from a crash on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa

from kcl_pipeline.batch import (
    CommitEntry,
    CommitOutcome,
    PositionStore,
    TransactionalSink,
    TxnVersions,
    Written,
)
from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import KclError, SettingsError, SinkError, UnavailableError
from kcl_pipeline.position import Position
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis

SINK_CALLS: Final = (
    "ensure_table",
    "txn_versions",
    "commit",
    "fence",
    "move",
    "write_dead_letters",
)
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
    """The sink of a process under test (`TransactionalSink`)."""

    def __init__(self, base: TransactionalSink, process: WorkerProcess) -> None:
        self._base = base
        self._call = process.call

    def ensure_table(self, schema: pa.Schema) -> None:
        """See `TransactionalSink.ensure_table`."""
        self._call("ensure_table", self._base.ensure_table, schema)

    def txn_versions(self, lease_keys: Sequence[str]) -> dict[str, TxnVersions]:
        """See `TransactionalSink.txn_versions`."""
        found: dict[str, TxnVersions] = self._call(
            "txn_versions", self._base.txn_versions, lease_keys
        )
        return found

    def commit(self, written: Written, entries: Sequence[CommitEntry]) -> CommitOutcome:
        """See `TransactionalSink.commit`."""
        outcome: CommitOutcome = self._call("commit", self._base.commit, written, entries)
        return outcome

    def fence(self, lease_key: str, expected: TxnVersions) -> TxnVersions | None:
        """See `TransactionalSink.fence`."""
        raised: TxnVersions | None = self._call("fence", self._base.fence, lease_key, expected)
        return raised

    def write_dead_letters(self, records: pa.Table) -> None:
        """See `TransactionalSink.write_dead_letters`."""
        self._call("write_dead_letters", self._base.write_dead_letters, records)


class FailingPositionSink(FailingSink):
    """The sink of a process under test that stores positions (`PositionStore`)."""

    def __init__(
        self, base: TransactionalSink, store: PositionStore, process: WorkerProcess
    ) -> None:
        super().__init__(base, process)
        self._store = store

    def move(
        self, key: str, expected: TxnVersions, position: Position | None, *, ended: bool
    ) -> TxnVersions | None:
        """See `PositionStore.move`."""
        moved: TxnVersions | None = self._call(
            "move", self._store.move, key, expected, position, ended=ended
        )
        return moved


def failing_sink(base: TransactionalSink, process: WorkerProcess) -> TransactionalSink:
    """Return the sink of a process under test."""
    if isinstance(base, PositionStore):
        return FailingPositionSink(base, base, process)
    return FailingSink(base, process)


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
