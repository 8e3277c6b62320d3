"""Read all application transactions of a Delta table at one version.

They are in the last checkpoint and in the entries after it. delta-rs returns one transaction per
call and reads all entries since the checkpoint for each (5 ms with 50 entries on a local disk).
Here all transactions together cost about one such call. The file list in the checkpoint is not
read.

A wrong version would allow a batch to be committed twice. If any part of the log cannot be parsed,
nothing is returned, and the caller uses delta-rs.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from kcl_pipeline.delta.log.entries import MAX_ENTRY_BYTES, entry_facts, entry_path
from kcl_pipeline.delta.log.restores import Restores
from kcl_pipeline.delta.storage.storage import Storage

MAX_ENTRIES: Final = 1000
"""Most entries since the last checkpoint. With more of them, delta-rs is faster."""
MAX_HINT_BYTES: Final = 4 * 1024 * 1024
MAX_PARTS: Final = 1000
MAX_ACTIONS: Final = 10_000_000
"""Most rows of one part of a checkpoint.

Each row takes 13 bytes of memory, even a row without a transaction, which takes no file space.
"""

_LAST_CHECKPOINT: Final = "_delta_log/_last_checkpoint"


class _Hint(msgspec.Struct):
    """The file `_last_checkpoint` (Delta protocol, "Last Checkpoint File")."""

    version: Annotated[int, msgspec.Meta(ge=0, le=10**18)]
    part_count: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARTS)] | None = msgspec.field(
        default=None, name="parts"
    )


_HINT: Final = msgspec.json.Decoder(_Hint)


def read_transactions(
    storage: Storage, version: int, restores: Restores | None = None
) -> dict[str, int] | None:
    """Every application transaction as of `version` (inclusive); None if it cannot be read.

    It cannot be read if the last checkpoint is newer than `version` or does not consist of Parquet
    files, or if entries after it do not exist any more. Raises nothing.

    Args:
        storage: The folder of the table.
        version: The last version that is read.
        restores: Receives each RESTORE since the last checkpoint.
    """
    try:
        checkpoint = _last_checkpoint(storage)
        first = 0 if checkpoint is None else checkpoint.version + 1
        if first > version + 1 or version - first >= MAX_ENTRIES:
            return None
        found = {} if checkpoint is None else _of_checkpoint(storage, checkpoint)
        for number in range(first, version + 1):
            facts = entry_facts(storage.read(entry_path(number), MAX_ENTRY_BYTES))
            if restores is not None and facts.restored_to is not None:
                restores.note(number, facts.restored_to, found)
            found |= facts.transactions
    except (OSError, ValueError, KeyError, TypeError, RecursionError, pa.ArrowException):
        return None
    return found


def _last_checkpoint(storage: Storage) -> _Hint | None:
    try:
        return _HINT.decode(storage.read(_LAST_CHECKPOINT, MAX_HINT_BYTES))
    except FileNotFoundError:
        return None


def _of_checkpoint(storage: Storage, checkpoint: _Hint) -> dict[str, int]:
    """Read the `txn` rows of all parts of a checkpoint.

    V2 checkpoints with UUID names are not supported. One with a classic name is read normally.
    """
    stem, parts = f"_delta_log/{checkpoint.version:020d}.checkpoint", checkpoint.part_count or 1
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
