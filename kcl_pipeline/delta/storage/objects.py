"""Define a listed object and the error for an unsafe object."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in a listing.

    Attributes:
        path: Path relative to the root.
        size: Size in bytes.
        modified_millis: Epoch milliseconds by the clock of the store.
    """

    path: str
    size: int
    modified_millis: int


class UnsafeObjectError(OSError):
    """The object is not a regular file below the root, or is larger than its reader accepts.

    The error is permanent. Other instances of `OSError` may be transient.
    """
