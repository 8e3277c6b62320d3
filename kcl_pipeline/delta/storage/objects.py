"""The entry of a listing of a table's objects, and the error about an object that is not safe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in a listing.

    Attributes:
        path: Relative to the root.
        size: In bytes.
        modified_millis: By the clock of the store.
    """

    path: str
    size: int
    modified_millis: int


class UnsafeObjectError(OSError):
    """The object is not a regular file below the root, or is larger than its reader accepts.

    Reading it again will not help. Any other `OSError` may pass.
    """
