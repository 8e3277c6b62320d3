"""All application transactions of a Delta table at one version, in one reading: the last checkpoint's and those of the entries after it.

delta-rs answers for one transaction at a time and reads everything since the checkpoint again for each (5 ms each with 50 entries, on a local disk). Here the
cost is that of one such answer, whatever the number of transactions, and the part of a checkpoint that names the table's files is not read.

Whoever gets a number wrong lets a batch land twice. So what is not understood to the last byte is not answered, and the caller asks delta-rs.
"""

from __future__ import annotations

import json
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from kcl_pipeline.spark.storage import Storage

MAX_ENTRIES: Final = 1000
"""More entries than this since the last checkpoint: somebody else's table, in which delta-rs reads them faster."""

_LAST_CHECKPOINT: Final = "_delta_log/_last_checkpoint"


def entry_path(version: int) -> str:
    """Where the log's entry of a version is, relative to the table."""
    return f"_delta_log/{version:020d}.json"


def entry_transactions(entry: bytes) -> dict[str, int]:
    """The application transactions that one entry of the log sets."""
    actions = (json.loads(line) for line in entry.splitlines() if b'"txn"' in line)
    return {txn["appId"]: txn["version"] for action in actions if (txn := action.get("txn")) is not None}


def read_transactions(storage: Storage, version: int) -> dict[str, int] | None:
    """Every application transaction as of `version` (inclusive); None when this log cannot be read this way. Raises nothing.

    It cannot where the last checkpoint is newer than `version`, has another layout than one or several Parquet files, or entries after it are gone.
    """
    try:
        checkpoint = _last_checkpoint(storage)
        first = 0 if checkpoint is None else int(checkpoint["version"]) + 1
        if first > version + 1 or version - first >= MAX_ENTRIES:
            return None
        found = {} if checkpoint is None else _of_checkpoint(storage, checkpoint)
        for number in range(first, version + 1):
            found |= entry_transactions(storage.read(entry_path(number)))
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None
    return found


def _last_checkpoint(storage: Storage) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(storage.read(_LAST_CHECKPOINT))
    except FileNotFoundError:
        return None
    return found


def _of_checkpoint(storage: Storage, checkpoint: dict[str, Any]) -> dict[str, int]:
    """The rows of `txn` of all parts. The layout with sidecars has a name of its own, which is not looked for: its classic name is read like any other."""
    stem, parts = f"_delta_log/{int(checkpoint['version']):020d}.checkpoint", int(checkpoint.get("parts") or 1)
    names = [f"{stem}.parquet"] if parts == 1 else [f"{stem}.{part:010d}.{parts:010d}.parquet" for part in range(1, parts + 1)]
    found: dict[str, int] = {}
    for name in names:
        with storage.open(name) as file:
            rows = pq.ParquetFile(file).read(columns=["txn.appId", "txn.version"])["txn"].drop_null().to_pylist()
        found |= {row["appId"]: row["version"] for row in rows}
    return found
