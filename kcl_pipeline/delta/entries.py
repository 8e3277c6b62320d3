"""Parse the entries and checkpoints of a Delta log, strictly and with limits.

Entries of other writers are read too. An entry that does not follow the Delta protocol is an error,
because a wrong transaction version would allow a batch to be committed twice. The caller then uses
delta-rs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final
from urllib.parse import quote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from kcl_pipeline.batch import DataFile
from kcl_pipeline.delta.storage import Storage
from kcl_pipeline.text import printable

MIN_NUMBER: Final = -(2**63)
MAX_NUMBER: Final = 2**63 - 1
"""Range of an application transaction's version (Delta protocol, "Transaction Identifiers")."""
MAX_ENTRY_BYTES: Final = 256 * 1024 * 1024
"""An entry that names about a million files. delta-rs reads larger ones itself."""

_NOTHING: Final = msgspec.Raw(b"")
_NULL: Final = frozenset({b"", b"null"})


@dataclass(frozen=True, slots=True)
class EntryFacts:
    """The parsed content of an entry.

    Attributes:
        transactions: The application transactions that it sets, with their versions.
        changes_table: Whether it changes the table's metadata or protocol.
        restored_to: The version or time that the table was restored to, as text. None: the entry
            is no RESTORE.
    """

    transactions: dict[str, int]
    changes_table: bool
    restored_to: str | None = None


class _Transaction(msgspec.Struct, rename="camel"):
    app_id: str
    version: Annotated[int, msgspec.Meta(ge=MIN_NUMBER, le=MAX_NUMBER)]


class _Action(msgspec.Struct, rename="camel"):
    txn: _Transaction | None = None
    meta_data: msgspec.Raw = _NOTHING
    protocol: msgspec.Raw = _NOTHING
    commit_info: msgspec.Raw = _NOTHING


_ACTION: Final = msgspec.json.Decoder(_Action)


def entry_path(version: int) -> str:
    """Path of a version's log entry, relative to the table."""
    return f"_delta_log/{version:020d}.json"


def append_entry(
    millis: int,
    partition_columns: Sequence[str],
    files: Sequence[DataFile],
    statistics: Sequence[str],
    transactions: Mapping[str, int],
) -> bytes:
    """Encode an entry that adds files and sets application transactions.

    Args:
        millis: Time of the commit.
        partition_columns: The columns that the table is partitioned by.
        files: The files.
        statistics: One JSON text for each file.
        transactions: Versions by name.
    """
    columns = msgspec.json.encode(list(partition_columns)).decode()
    information = {
        "timestamp": millis,
        "operation": "WRITE",
        "operationParameters": {"mode": "Append", "partitionBy": columns},
        "isBlindAppend": True,
        "engineInfo": "kcl_pipeline",
    }
    adds = [
        {
            "path": quote(file.path, safe="/="),
            "partitionValues": file.partition_values,
            "size": file.size,
            "modificationTime": file.modified_millis,
            "dataChange": True,
            "stats": stats,
        }
        for file, stats in zip(files, statistics, strict=True)
    ]
    return msgspec.json.Encoder().encode_lines(
        [
            {"commitInfo": information},
            *({"add": add} for add in adds),
            *({"txn": {"appId": name, "version": n}} for name, n in transactions.items()),
        ]
    )


def entry_facts(entry: bytes) -> EntryFacts:
    """Parse an entry.

    Raises:
        ValueError: The entry does not follow the Delta protocol.
    """
    if not entry.isascii():
        entry.decode()  # msgspec does not look at what it skips
    try:
        actions = _ACTION.decode_lines(entry)
    except RecursionError as error:
        raise ValueError("an action of the Delta log is nested too deeply") from error
    if len(actions) != entry.count(b"\n") + (not entry.endswith(b"\n")):
        _check_lines(entry, len(actions))
    return EntryFacts(
        {one.txn.app_id: one.txn.version for one in actions if one.txn is not None},
        any(
            not _NULL.issuperset((bytes(one.meta_data), bytes(one.protocol)))
            for one in actions
            if one.meta_data is not _NOTHING or one.protocol is not _NOTHING
        ),
        next((to for one in actions if (to := _restored_to(one.commit_info)) is not None), None),
    )


class _CommitInfo(msgspec.Struct, rename="camel"):
    operation: str = ""
    operation_parameters: dict[str, Any] = msgspec.field(default_factory=dict)


_COMMIT_INFO: Final = msgspec.json.Decoder(_CommitInfo)
_RESTORE: Final = "RESTORE"
_SHOWN: Final = 100


def _restored_to(commit_info: msgspec.Raw) -> str | None:
    """Return what a `commitInfo` says the table was restored to. None: it is no RESTORE.

    The protocol lets a writer put anything there, so nothing in it is an error.
    """
    raw = bytes(commit_info)
    if _RESTORE.encode() not in raw:
        return None
    try:
        found = _COMMIT_INFO.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return None
    if found.operation != _RESTORE:
        return None
    given = found.operation_parameters
    version, time = given.get("version"), given.get("datetime") or given.get("timestamp")
    if version is not None:
        return f"version {printable(str(version), _SHOWN)}"
    return "an unknown version" if time is None else f"the version of {_time_text(str(time))}"


def _time_text(text: str) -> str:
    """Return a time. delta-rs writes epoch milliseconds, Spark writes text."""
    try:
        return datetime.fromtimestamp(int(text) / 1000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return printable(text, _SHOWN)


class _Protocol(msgspec.Struct, rename="camel"):
    min_writer_version: int
    writer_features: list[str] | None = None
    reader_features: list[str] | None = None


class _ProtocolAction(msgspec.Struct):
    protocol: _Protocol | None = None


_PROTOCOL_ACTION: Final = msgspec.json.Decoder(_ProtocolAction)


def protocol_of(entry: bytes) -> tuple[int, list[str] | None, list[str] | None] | None:
    """Return writer version, writer features and reader features that an entry sets; None: none.

    Raises:
        ValueError: The entry does not follow the Delta protocol.
    """
    for action in _PROTOCOL_ACTION.decode_lines(entry):
        if action.protocol is not None:
            found = action.protocol
            return found.min_writer_version, found.writer_features, found.reader_features
    return None


def _check_lines(entry: bytes, actions: int) -> None:
    """Refuse a line with several actions. Empty lines are ignored."""
    if actions != sum(1 for line in entry.splitlines() if line.strip()):
        raise ValueError("a line of the Delta log is not exactly one action")


MAX_RESTORES: Final = 16
"""Only the newest are kept: each has the names of all transactions."""


@dataclass(frozen=True, slots=True)
class Restore:
    """An entry that restored the table.

    Attributes:
        version: Version of the entry.
        restored_to: The restored version or time, as text.
        transactions: Names of the application transactions that the table had before. None: they
            cannot be read.
    """

    version: int
    restored_to: str
    transactions: frozenset[str] | None

    def is_after_first_commit(self, name: str) -> bool:
        """Return whether a transaction that the table has now was set before this entry."""
        return self.transactions is None or name in self.transactions


def note_restore(
    restores: list[Restore],
    version: int,
    restored_to: str,
    before: Mapping[str, int | None] | None,
) -> None:
    """Add an entry that restored the table, and keep only the newest ones.

    Args:
        restores: The entries that are known, in their order.
        version: Version of the entry.
        restored_to: See `Restore`.
        before: The transactions directly before the entry, with their versions; the version None is
            that of a transaction that was never written. None: they cannot be read.
    """
    names = None
    if before is not None:
        names = frozenset(name for name, number in before.items() if number is not None)
    restores.append(Restore(version, restored_to, names))
    del restores[:-MAX_RESTORES]


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
    storage: Storage, version: int, restores: list[Restore] | None = None
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
                note_restore(restores, number, facts.restored_to, found)
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
