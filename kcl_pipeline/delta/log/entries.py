"""Parse the transactions and metadata changes of one Delta log entry, strictly and with limits.

Entries of other writers are read too. An entry that does not follow the Delta protocol is an error,
because a wrong transaction version would allow a batch to be committed twice. The caller then uses
delta-rs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

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
    """

    transactions: dict[str, int]
    changes_table: bool


class _Transaction(msgspec.Struct, rename="camel"):
    app_id: str
    version: Annotated[int, msgspec.Meta(ge=MIN_NUMBER, le=MAX_NUMBER)]


class _Action(msgspec.Struct, rename="camel"):
    txn: _Transaction | None = None
    meta_data: msgspec.Raw = _NOTHING
    protocol: msgspec.Raw = _NOTHING


_ACTION: Final = msgspec.json.Decoder(_Action)


def entry_path(version: int) -> str:
    """Path of a version's log entry, relative to the table."""
    return f"_delta_log/{version:020d}.json"


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
    )


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
