"""The part of a sink that settles prepared batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kcl_pipeline.batch import PositionStore, TxnVersions
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink


class BatchLog(Protocol):
    """Knows which batches landed. A `TransactionalSink` is one."""

    def txn_versions(self, lease_keys: Sequence[str]) -> dict[str, TxnVersions]:
        """See `TransactionalSink.txn_versions`."""
        ...

    def fence(self, lease_key: str, expected: TxnVersions) -> TxnVersions | None:
        """See `TransactionalSink.fence`."""
        ...


class NoLog:
    """The log of a `ForeachBatchSink`, which has none: its batches are read again."""

    def txn_versions(self, lease_keys: Sequence[str]) -> dict[str, TxnVersions]:
        """Return no versions."""
        return dict.fromkeys(lease_keys, TxnVersions())

    def fence(self, lease_key: str, expected: TxnVersions) -> TxnVersions | None:  # noqa: ARG002
        """Return the expected versions: nothing can be fenced."""
        return expected


def position_store(log: object) -> PositionStore | None:
    """Return the log if it stores positions, else None."""
    return log if isinstance(log, PositionStore) else None


def log_of_sink(sink: object, application_name: str) -> BatchLog:
    """Return the log of a sink."""
    if isinstance(sink, DeltaSink):
        return DeltaCommitter(sink, application_name)
    return NoLog()
