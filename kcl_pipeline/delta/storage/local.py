"""Access a table's folder on a local disk.

Other users may write to the folder. Below the root no symbolic link is followed when an object is
read, measured, listed or deleted. Only regular files are opened, and opening never blocks: a FIFO
with an expected name is an error. The root itself may be a link.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

import pyarrow as pa

from kcl_pipeline.delta.storage.page_cache import WrittenFiles
from kcl_pipeline.sinks.objects import StoredObject, UnsafeObjectError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
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
