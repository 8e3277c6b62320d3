"""The objects that announcements are stored in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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


class ObjectStore(Protocol):
    """Objects below one root. Paths are relative to it and separated by `/`.

    Every method raises `OSError` if it fails, and `FileNotFoundError` for a missing object.
    """

    def read_each(
        self, folder: str, names: Iterable[str], limit: int
    ) -> Iterator[tuple[str, bytes | OSError]]:
        """Read several objects of one folder: yield each path with its content or its error.

        Raises:
            OSError: The folder cannot be read.
        """

    def create(self, path: str, *, durable: bool = True) -> AbstractContextManager[Any]:
        """Open a binary stream that creates or replaces the object atomically.

        The object exists after the `with` block has ended without an error.

        Args:
            path: Path of the object.
            durable: Whether it must outlast a power failure. False saves a wait for the disk.
        """

    def list(self, folder: str, limit: int | None = None) -> list[StoredObject]:
        """List the objects below a folder at any depth, sorted by path.

        Objects that are not regular files are included. A missing folder gives an empty list.

        Args:
            folder: Path of the folder.
            limit: Most objects to return; which ones is not defined.
        """

    def map(self, call: Callable[[_Item], _Result], items: Sequence[_Item]) -> Sequence[_Result]:
        """Call a function with each item; at the same time, if the store is on a network."""

    def delete(self, *paths: str) -> None:
        """Remove the objects that exist, on a network with as few requests as possible."""
