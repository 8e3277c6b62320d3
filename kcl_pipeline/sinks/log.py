"""The interfaces of a table format: its `Log`, and the `ObjectStore` of its announcements.

Retries, waiting, combined commits and the comparison of positions are in `sink.TableSink`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from kcl_pipeline.batch import DataFile
from kcl_pipeline.position import StoredPosition

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


class Head(Protocol):
    """The newest state of a table. It is valid until the log is read again.

    Attributes:
        version: Grows with every commit of any writer.
        table_id: Id of the table. A table that is created again at the same place has another one.
        form: Digest of what files must fit: columns and partitioning. Files that fit a form fit
            every head with an equal form.
        changed: Number of shards whose position the newest version has set. Only the waiting time
            of combined commits depends on it. 0: unknown.
    """

    @property
    def version(self) -> int: ...  # noqa: D102 (see Attributes)

    @property
    def table_id(self) -> str: ...  # noqa: D102

    @property
    def form(self) -> str: ...  # noqa: D102

    @property
    def changed(self) -> int: ...  # noqa: D102

    def stored(self, key: str) -> StoredPosition:
        """Return what the table stores for a shard.

        Raises:
            TableMismatchError: The position cannot be read. Other shards can.
        """


class Log(Protocol):
    """The log of one table. `TableSink` calls it from one thread at a time.

    Any method may raise any exception. After a failed `add` the caller reads the log and compares
    positions, so no type of exception has a meaning, with one exception: `TableMismatchError` of
    `ensure`, `read` and `Head.stored` is not retried.

    Attributes:
        name: Address of the table, for messages.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 (see Attributes)

    def ensure(self, schema: pa.Schema) -> bool:
        """Create the table, or add missing columns. Cheap if nothing has changed.

        Returns:
            Whether a `Head` that was read before is not the newest any more.

        Raises:
            TableMismatchError: The columns do not fit.
        """

    def read(self) -> Head | None:
        """Return the end of the log. None: the table does not exist."""

    def peek(self) -> Head | None:
        """Return a state that is not older than the last one, if this is cheaper than `read`.

        It may be one version at a time: the caller asks again until the version stays the same.
        None: only `read` can tell.
        """

    def add(
        self, head: Head, files: Sequence[DataFile], sets: Mapping[str, StoredPosition]
    ) -> None:
        """Make the one successor of `head`, from the last `read`, or raise.

        Files and positions become visible together. Two successors of one head must be impossible.
        """

    def batch_name(self, files: Sequence[DataFile]) -> str | None:
        """Return a name of 32 hexadecimal digits that belongs to these files alone.

        It names their announcement. None: they are committed by their writer alone.
        """

    def problem(self, name: str, files: Sequence[DataFile]) -> str | None:
        """Return why the announced files of another writer cannot be added. None: they can.

        An announcement is not authenticated. Check the paths, that `name` is their `batch_name`,
        partition values, and that each file exists with its size.

        Raises:
            OSError: It cannot be found out now.
        """

    def upkeep(self, version: int) -> None:
        """Do what the format needs after the commit of a version, such as log checkpoints."""
