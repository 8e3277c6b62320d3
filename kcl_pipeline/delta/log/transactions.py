"""All application transactions of a Delta table at one version, in one reading: the last
checkpoint's and those of the entries after it.

delta-rs answers for one transaction at a time and reads everything since the checkpoint again for
each (5 ms each with 50 entries, on a local disk). Here the cost is that of one such answer,
whatever the number of transactions, and the part of a checkpoint that names the table's files is
not read.

A wrong number lets a batch land twice. So what is not understood to the last byte is
not answered, and the caller asks delta-rs.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from kcl_pipeline.delta.log.entries import MAX_ENTRY_BYTES, entry_facts, entry_path
from kcl_pipeline.delta.storage.storage import Storage

MAX_ENTRIES: Final = 1000
"""More entries than this since the last checkpoint: somebody else's table, in which delta-rs reads
them faster.
"""
MAX_HINT_BYTES: Final = 4 * 1024 * 1024
MAX_PARTS: Final = 1000
MAX_ACTIONS: Final = 10_000_000
"""Rows of a part of a checkpoint: each takes 13 bytes of memory, also where it is no transaction
and takes nothing in the file.
"""

_LAST_CHECKPOINT: Final = "_delta_log/_last_checkpoint"


class _Hint(msgspec.Struct):
    """The file `_last_checkpoint` (Delta protocol, "Last Checkpoint File")."""

    version: Annotated[int, msgspec.Meta(ge=0, le=10**18)]
    parts: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARTS)] | None = None


_HINT: Final = msgspec.json.Decoder(_Hint)


def read_transactions(storage: Storage, version: int) -> dict[str, int] | None:
    """Every application transaction as of `version` (inclusive); None when this log cannot be read
    this way. Raises nothing.

    It cannot where the last checkpoint is newer than `version`, has another layout than one or
    several Parquet files, or entries after it are gone.
    """
    try:
        checkpoint = _last_checkpoint(storage)
        first = 0 if checkpoint is None else checkpoint.version + 1
        if first > version + 1 or version - first >= MAX_ENTRIES:
            return None
        found = {} if checkpoint is None else _of_checkpoint(storage, checkpoint)
        for number in range(first, version + 1):
            found |= entry_facts(storage.read(entry_path(number), MAX_ENTRY_BYTES)).transactions
    except (OSError, ValueError, KeyError, TypeError, RecursionError, pa.ArrowException):
        return None
    return found


def _last_checkpoint(storage: Storage) -> _Hint | None:
    try:
        return _HINT.decode(storage.read(_LAST_CHECKPOINT, MAX_HINT_BYTES))
    except FileNotFoundError:
        return None


def _of_checkpoint(storage: Storage, checkpoint: _Hint) -> dict[str, int]:
    """The rows of `txn` of all parts.

    The layout with sidecars has a name of its own, which is not looked for: its classic name is
    read like any other.
    """
    stem, parts = f"_delta_log/{checkpoint.version:020d}.checkpoint", checkpoint.parts or 1
    names = (
        [f"{stem}.parquet"]
        if parts == 1
        else [f"{stem}.{part:010d}.{parts:010d}.parquet" for part in range(1, parts + 1)]
    )
    found: dict[str, int] = {}
    for name in names:
        with storage.open(name) as file:
            content = pq.ParquetFile(file)
            if content.metadata.num_rows > MAX_ACTIONS:
                raise ValueError(f"{name} has {content.metadata.num_rows} actions")
            rows = content.read(columns=["txn.appId", "txn.version"])["txn"].drop_null()
        found |= {row["appId"]: row["version"] for row in rows.to_pylist()}
    if not all(isinstance(key, str) and isinstance(one, int) for key, one in found.items()):
        raise TypeError("a transaction of the checkpoint has no name or no version")
    return found
