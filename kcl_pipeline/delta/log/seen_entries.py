"""Recognise a log whose entries were exchanged below an open handle.

A folder that is emptied, replaced, or restored from a backup has other entries under the same
numbers, or none. Without this check, a handle of the former table commits to the new one.
"""

from __future__ import annotations

import hashlib
from typing import Final

_KEPT: Final = 1024


class SeenEntries:
    """Digests of the entries that were read last."""

    def __init__(self) -> None:
        self._digests: dict[int, bytes] = {}

    def begin(self, version: int, entry: bytes | None) -> None:
        """Forget all entries but this one of a table that was opened. None: it cannot be read."""
        self._digests = {} if entry is None else {version: hashlib.sha256(entry).digest()}

    def note(self, version: int, entry: bytes) -> None:
        """Note an entry that was read."""
        self._digests[version] = hashlib.sha256(entry).digest()
        self._digests.pop(version - _KEPT, None)

    def is_same(self, version: int, entry: bytes | None) -> bool:
        """Return whether an entry is the one that was read, if it was."""
        known = self._digests.get(version)
        return known is None or (entry is not None and hashlib.sha256(entry).digest() == known)
