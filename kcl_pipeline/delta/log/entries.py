"""Parse one Delta log entry, strictly and with limits: transactions, changes of metadata, RESTORE.

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

from kcl_pipeline.batch import DataFile
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
