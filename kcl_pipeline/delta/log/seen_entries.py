"""Recognise a log whose entries were exchanged below an open handle.

A folder that is emptied, replaced, or restored from a backup has other entries under the same
numbers, or none. Without this check, a handle of the former table commits to the new one.
"""

from __future__ import annotations

import hashlib
from typing import Final

from kcl_pipeline.delta.log.entries import MAX_ENTRY_BYTES, entry_path
from kcl_pipeline.delta.storage.storage import Storage

_KEPT: Final = 1024


class SeenEntries:
    """Digests of the entries that were read last."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._digests: dict[int, bytes] = {}

    def begin(self, version: int) -> None:
        """Forget all entries, and read the one of a table that was opened at this version."""
        digest = self._read(version)
        self._digests = {} if digest is None else {version: digest}

    def note(self, version: int, entry: bytes) -> None:
        """Note an entry that was read."""
        self._digests[version] = hashlib.sha256(entry).digest()
        self._digests.pop(version - _KEPT, None)

    def is_same(self, version: int) -> bool:
        """Return whether the log still has the entry that was read, if it was."""
        known = self._digests.get(version)
        return known is None or self._read(version) == known

    def _read(self, version: int) -> bytes | None:
        """Return the digest of an entry; None if it cannot be read."""
        try:
            entry = self._storage.read(entry_path(version), MAX_ENTRY_BYTES)
        except (OSError, ValueError):
            return None
        return hashlib.sha256(entry).digest()
