"""Read, write, list and delete objects below a table's root, on a disk or in an object store.

Object stores use the same storage options as the table's log. No write is conditional, except
`create_new`: other objects that must not be overwritten get unique names from their writers.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Final, Protocol, TypeVar

import pyarrow as pa

from kcl_pipeline.delta.address import is_local, local_path
from kcl_pipeline.sinks.log import ObjectStore, StoredObject, UnsafeObjectError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Storage(ObjectStore, Protocol):
    """The objects of a table: its log, its files and its announcements."""

    def read(self, path: str, limit: int | None = None) -> bytes:
        """Read the whole object.

        Raises:
            UnsafeObjectError: It has more than `limit` bytes, or is not a regular file.
        """

    def open(self, path: str) -> pa.NativeFile:
        """Open the object to read parts of it. The caller closes it."""

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

    def creates_once(self) -> bool:
        """Find out whether the store refuses to create an object that exists.

        Commits to the log need this.
        """


def open_storage(uri: str, storage_options: Mapping[str, str] | None = None) -> Storage:
    """Open the storage below `uri`."""
    if is_local(uri):
        return LocalStorage(local_path(uri))
    # Loaded here: a table on a local disk needs no client.
    from kcl_pipeline.delta.object_store import ObjectStorage  # noqa: PLC0415

    return ObjectStorage(uri.rstrip("/"), dict(storage_options or {}))


_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LINK_REFUSED: Final = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EMLINK})
_PART_BYTES: Final = 1024 * 1024
_PARTIAL: Final = ".partial"
_INVALID_NAMES: Final = frozenset({"", ".", ".."})
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LocalStorage:
    """The `Storage` of a folder on this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._written = WrittenFiles()

    # The protocol `Storage` documents these methods.
    def read(self, path: str, limit: int | None = None) -> bytes:  # noqa: D102
        with self._folder_of(path) as (folder, name):
            return _read(name, folder, path, limit)

    def read_each(  # noqa: D102
        self, folder: str, names: Iterable[str], limit: int
    ) -> Iterator[tuple[str, bytes | OSError]]:
        with self._folder(folder) as opened:
            for name in names:
                path = f"{folder}/{name}"
                try:
                    yield path, _read(name, opened, path, limit)
                except OSError as error:
                    yield path, error

    def open(self, path: str) -> pa.NativeFile:  # noqa: D102
        return pa.OSFile(str(self.root / path))

    @contextmanager
    def create(  # noqa: D102
        self, path: str, *, durable: bool = True
    ) -> Iterator[pa.NativeFile]:
        target = self.root / path
        new_folders = _create_folders(target.parent)
        # Without a leading dot, so that vacuum finds the file of a killed process.
        partial = target.with_name(f"{target.name}{_PARTIAL}")
        try:
            with pa.OSFile(str(partial), "wb") as stream:
                yield stream
            # On the disk before the log names it: a power failure must not leave an empty file
            # that a commit has. The file first, then its name, then the names of new folders.
            if durable:
                _sync(partial)
            partial.replace(target)
            for folder in (target.parent, *new_folders) if durable else ():
                _sync(folder)
            self._written.add(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def create_new(self, path: str, data: bytes) -> None:  # noqa: D102
        target = self.root / path
        # A hard link replaces nothing. Readers of a log ignore this name.
        partial = target.with_name(f"_commit_{uuid.uuid4().hex}.json.tmp")
        try:
            partial.write_bytes(data)
            os.link(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    def size(self, path: str) -> int | None:  # noqa: D102
        *folders, name = path.split("/")
        parent = str(self.root)
        try:
            for step in folders:
                parent = f"{parent}/{step}"
                if step in _INVALID_NAMES or not stat.S_ISDIR(os.lstat(parent).st_mode):
                    return None
            found = os.lstat(f"{parent}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def list(  # noqa: D102
        self, folder: str, limit: int | None = None, *, partial: bool = False, after: str = ""
    ) -> list[StoredObject]:
        hidden = () if partial else (_PARTIAL,)
        found = (
            stored
            for stored in self._walk(folder.strip("/"))
            if stored.path > after and not stored.path.endswith(hidden)
        )
        return sorted(islice(found, limit), key=lambda stored: stored.path)

    def map(  # noqa: D102
        self, call: Callable[[_Item], _Result], items: Sequence[_Item]
    ) -> Sequence[_Result]:
        return [call(item) for item in items]

    def delete(self, *paths: str) -> None:  # noqa: D102
        for path in paths:
            with suppress(FileNotFoundError), self._folder_of(path) as (folder, name):
                os.unlink(name, dir_fd=folder)

    def creates_once(self) -> bool:  # noqa: D102
        return True  # `create_new` is a hard link

    def _walk(self, folder: str) -> Iterator[StoredObject]:
        """Yield the objects of a folder and of its subfolders, however deep these are."""
        folders = [folder]
        while folders:
            path = folders.pop()
            with (
                suppress(FileNotFoundError, NotADirectoryError),
                self._folder(path) as opened,
                os.scandir(opened) as entries,
            ):
                for entry in entries:
                    inner = f"{path}/{entry.name}" if path else entry.name
                    try:
                        known = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISDIR(known.st_mode):
                        folders.append(inner)
                    elif not entry.name.startswith("."):
                        yield StoredObject(inner, known.st_size, known.st_mtime_ns // 1_000_000)

    @contextmanager
    def _folder_of(self, path: str) -> Iterator[tuple[int, str]]:
        """The open folder of an object, and the object's name in it."""
        parent, _, name = path.rpartition("/")
        with self._folder(parent) as folder:
            yield folder, name

    @contextmanager
    def _folder(self, path: str) -> Iterator[int]:
        """An open folder, reached from the root without a link. Raises `UnsafeObjectError`."""
        opened = os.open(self.root, _FOLDER_FLAGS)
        try:
            for step in path.split("/") if path else ():
                if step in _INVALID_NAMES:
                    raise UnsafeObjectError(f"{path!r} is not a plain path below the table")
                inner = _opened(step, _FOLDER_FLAGS | os.O_NOFOLLOW, opened, path)
                os.close(opened)
                opened = inner
            yield opened
        finally:
            os.close(opened)


def _create_folders(folder: Path) -> list[Path]:
    """Create a folder with its parents. Returns the folders that have a new name in them."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for one in reversed(missing):
        one.mkdir(exist_ok=True)  # another process may create it now
    return [one.parent for one in missing]


def _sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(name: str, folder: int, path: str, limit: int | None) -> bytes:
    descriptor = _opened(name, _FILE_FLAGS, folder, path)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnsafeObjectError(f"{path} is not a regular file")
        parts: list[bytes] = []
        length = 0
        while part := os.read(descriptor, _PART_BYTES):
            parts.append(part)
            length += len(part)
            if limit is not None and length > limit:
                raise UnsafeObjectError(f"{path} has more than {limit} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(descriptor)


def _opened(name: str, flags: int, folder: int, path: str) -> int:
    """Open a descriptor without following a link; raise `UnsafeObjectError` for a link."""
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise UnsafeObjectError(f"{path} is not a regular file") from error
        # For a folder Linux returns ENOTDIR; other systems return ELOOP or EMLINK.
        if error.errno in _LINK_REFUSED and _is_link(name, folder):
            raise UnsafeObjectError(f"{path} is a link, or is reached through one") from error
        raise


def _is_link(name: str, folder: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


LARGE_BYTES: Final = 1024 * 1024
"""Smaller files stay in the cache: they cost little, and a program may wait for them."""
WAITING_BYTES: Final = 128 * 1024 * 1024
"""Bytes of files that wait. The kernel drops only pages that it has written to the disk."""


class WrittenFiles:
    """Files of one table whose pages are dropped after others were written. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Path, int]] = deque()
        self._bytes = 0

    def add(self, path: Path) -> None:
        """Let the kernel start to write a new file, and drop the pages of older ones.

        A file that was removed meanwhile has no pages, and a system without this advice keeps them.
        """
        size = drop_pages(path, at_least=LARGE_BYTES)
        if not size:
            return
        with self._lock:
            self._waiting.append((path, size))
            self._bytes += size
            due = []
            while self._bytes - self._waiting[0][1] >= WAITING_BYTES:
                oldest, its = self._waiting.popleft()
                self._bytes -= its
                due.append(oldest)
        for one in due:
            drop_pages(one)


def drop_pages(path: Path, at_least: int = 0) -> int:
    """Drop the pages of a file that are on the disk, and start to write the others.

    Returns:
        Size of the file in bytes; 0 if it is smaller than `at_least`, or nothing was done.
    """
    with suppress(OSError, AttributeError):
        descriptor = os.open(path, _FILE_FLAGS)
        try:
            size = os.fstat(descriptor).st_size
            if size >= at_least:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                return size
        finally:
            os.close(descriptor)
    return 0
