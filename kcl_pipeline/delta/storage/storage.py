"""Read, write, list and delete objects below a table's root, on a disk or in an object store.

Object stores use the same storage options as the table's log. No write is conditional, except
`create_new`: other objects that must not be overwritten get unique names from their writers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Protocol, TypeVar
from urllib.parse import unquote

import pyarrow as pa

from kcl_pipeline.delta.storage.local import LocalStorage
from kcl_pipeline.settings_errors import wrong
from kcl_pipeline.sinks.objects import StoredObject

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_SCHEME: Final = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")
_ESCAPE: Final = re.compile(r"%[0-9A-Fa-f]{2}")
"""delta-rs decodes it, the writer of a local file does not."""
_UNUSABLE: Final = re.compile(r"[\\\[\]|^]")
"""delta-rs reads a backslash as a slash, and panics at the others."""
_NOT_IN_URL: Final = re.compile(r"[?#]")
"""delta-rs ends the path of an URL here."""


class Storage(Protocol):
    """Objects below one root. All paths are relative to it and separated by `/`.

    Every method raises `OSError` if it fails, and `FileNotFoundError` for a missing object.
    """

    def read(self, path: str, limit: int | None = None) -> bytes:
        """Read the whole object.

        Raises:
            UnsafeObjectError: It has more than `limit` bytes, or is not a regular file.
        """

    def read_each(
        self, folder: str, names: Iterable[str], limit: int
    ) -> Iterator[tuple[str, bytes | OSError]]:
        """Read several objects of one folder: yield each path with its content or its error.

        Raises:
            OSError: The folder cannot be read.
        """

    def open(self, path: str) -> pa.NativeFile:
        """Open the object to read parts of it. The caller closes it."""

    def create(self, path: str, *, durable: bool = True) -> AbstractContextManager[pa.NativeFile]:
        """Open a stream that creates or replaces the object atomically.

        The object exists after the `with` block has ended without an error.

        Args:
            path: Path of the object.
            durable: Whether it must outlast a power failure. False saves a wait for the disk.
        """

    def create_new(self, path: str, data: bytes) -> None:
        """Create an object that does not exist, atomically. Its folder exists.

        Raises:
            OSError: It exists, or the outcome is not known.
        """

    def size(self, path: str) -> int | None:
        """The object's size in bytes; None if it does not exist or is not a regular file."""

    def list(
        self, folder: str, limit: int | None = None, *, partial: bool = False, after: str = ""
    ) -> list[StoredObject]:
        """List the objects below a folder at any depth, sorted by path.

        Objects that are not regular files are included. A missing folder gives an empty list.

        Args:
            folder: Path of the folder.
            limit: Most objects to return; which ones is not defined.
            partial: Include objects that are being written, or that a killed process was writing.
            after: Only objects whose paths are sorted after this one.
        """

    def map(self, call: Callable[[_Item], _Result], items: Sequence[_Item]) -> Sequence[_Result]:
        """Call a function with each item; at the same time, if the store is on a network."""

    def delete(self, *paths: str) -> None:
        """Remove the objects that exist, on a network with as few requests as possible."""

    def creates_once(self) -> bool:
        """Find out whether the store refuses to create an object that exists.

        Commits to the log need this.
        """


def is_local(uri: str) -> bool:
    """Whether the URI is a path on this machine: a plain path or `file://`."""
    return uri.startswith("file:") or not _SCHEME.match(uri)


def local_path(uri: str) -> Path:
    """The absolute path of a local URI."""
    path = unquote(re.sub(r"^file:(//)?", "", uri)) if uri.startswith("file:") else uri
    # `..` is removed by its text, as by delta-rs, so that log and files are in one folder also if a
    # part of the path is a symbolic link
    return Path(os.path.normpath(Path(path).expanduser().absolute()))


def table_root(uri: str) -> str:
    """Normalize the URI: an absolute path for a local one, without a slash at the end."""
    return str(local_path(uri)) if is_local(uri) else uri.rstrip("/")


def check_path(name: str, uri: str) -> None:
    """Refuse an address that delta-rs and the writers of files understand differently.

    The log would be in one folder and the data files in another, or delta-rs would panic.

    Args:
        name: Name of the argument.
        uri: Its value.

    Raises:
        SettingsError: The address cannot be used.
    """
    advice = "Write an address of the characters A-Z a-z 0-9 _ . - = / and the like"
    try:
        root = table_root(uri)
    except RuntimeError as error:  # no home folder
        raise wrong(name, uri, f"cannot be resolved ({error})", "Write an absolute path") from error
    found = _ESCAPE.search(root) or _UNUSABLE.search(root)
    if found is None and not is_local(uri):
        path = _SCHEME.sub("", root)
        found = _NOT_IN_URL.search(path)
        if found is None and not {"", ".", ".."}.isdisjoint(path.split("/")[1:]):
            problem = "has an empty part, or one of only dots, between slashes"
            raise wrong(name, uri, problem, "Write each folder once, as in 's3://lake/orders'")
    if found is not None:
        problem = f"contains {found.group()}, which delta-rs reads as something else"
        raise wrong(name, uri, problem, advice)


def open_storage(uri: str, storage_options: Mapping[str, str] | None = None) -> Storage:
    """Open the storage below `uri`."""
    if is_local(uri):
        return LocalStorage(local_path(uri))
    # Loaded here: a table on a local disk needs no client.
    from kcl_pipeline.delta.storage.object_store import ObjectStorage  # noqa: PLC0415

    return ObjectStorage(uri.rstrip("/"), dict(storage_options or {}))
