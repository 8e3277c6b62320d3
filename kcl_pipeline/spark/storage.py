"""The objects under a table's root, on a local disk or in an object store: read, write, list, delete.

Object stores are reached with the same client and the same storage options as the table's log, so that there is one set of settings and no
second one to get wrong. Nothing here is conditional: who writes an object that must not be overwritten gives it a name of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote

_SCHEME: Final = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in a listing: `path` relative to the root, `size` in bytes, `modified_millis` by the clock of the store."""

    path: str
    size: int
    modified_millis: int


class Storage(Protocol):
    """Objects under one root; all paths are relative to it and `/`-separated. Raises `OSError`, and `FileNotFoundError` where that is the reason."""

    def read(self, path: str) -> bytes:
        """The whole object."""
        ...

    def write(self, path: str, data: bytes | memoryview) -> None:
        """Create or replace the object; a reader sees all of it or nothing."""
        ...

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        ...

    def list(self, folder: str) -> list[StoredObject]:
        """The objects below a folder at any depth, by path; none when there is no such folder."""
        ...

    def delete(self, path: str) -> None:
        """Remove the object; removing one that is not there is no error."""
        ...


def is_local(uri: str) -> bool:
    """Whether the URI is a path of this machine: a plain path or `file://`."""
    return uri.startswith("file:") or not _SCHEME.match(uri)


def local_path(uri: str) -> Path:
    """The absolute path of a local URI."""
    path = unquote(re.sub(r"^file:(//)?", "", uri)) if uri.startswith("file:") else uri
    return Path(path).expanduser().absolute()


def table_root(uri: str) -> str:
    """The URI in the one form used inside: absolute path for local ones, no slash at the end."""
    return str(local_path(uri)) if is_local(uri) else uri.rstrip("/")


def open_storage(uri: str, storage_options: Mapping[str, str] | None = None) -> Storage:
    """The storage below `uri`."""
    return LocalStorage(local_path(uri)) if is_local(uri) else ObjectStorage(uri.rstrip("/"), dict(storage_options or {}))


class LocalStorage:
    """A folder of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, path: str) -> bytes:  # noqa: D102 (documented by the protocol, as are the others)
        return (self.root / path).read_bytes()

    def write(self, path: str, data: bytes | memoryview) -> None:  # noqa: D102
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        partial.write_bytes(data)
        partial.replace(target)

    def exists(self, path: str) -> bool:  # noqa: D102
        return (self.root / path).is_file()

    def list(self, folder: str) -> list[StoredObject]:  # noqa: D102
        found = []
        for directory, _, names in os.walk(self.root / folder):
            for name in names:
                if name.startswith("."):
                    continue
                file = Path(directory) / name
                try:
                    stat = file.stat()
                except FileNotFoundError:
                    continue
                found.append(StoredObject(file.relative_to(self.root).as_posix(), stat.st_size, stat.st_mtime_ns // 1_000_000))
        return sorted(found, key=lambda stored: stored.path)

    def delete(self, path: str) -> None:  # noqa: D102
        (self.root / path).unlink(missing_ok=True)


class ObjectStorage:
    """A prefix of an object store, through the client of delta-rs."""

    def __init__(self, uri: str, storage_options: dict[str, str]) -> None:
        self._uri = uri
        self._options = storage_options
        self._handler: Any = None

    def _store(self) -> Any:
        if self._handler is None:
            from deltalake.fs import DeltaStorageHandler  # noqa: PLC0415 (its runtime must start in the process that uses it)

            self._handler = DeltaStorageHandler(self._uri, options=self._options)._handler  # noqa: SLF001 (the wrapper cannot take pyarrow buffers)
        return self._handler

    def read(self, path: str) -> bytes:  # noqa: D102
        with _os_errors(f"{self._uri}/{path}"):
            return bytes(self._store().open_input_file(path).read())

    def write(self, path: str, data: bytes | memoryview) -> None:  # noqa: D102
        with _os_errors(f"{self._uri}/{path}"):
            stream = self._store().open_output_stream(path)
            stream.write(bytes(data))
            stream.close()

    def exists(self, path: str) -> bool:  # noqa: D102
        with _os_errors(f"{self._uri}/{path}"):
            return bool(self._store().get_file_info([path])[0].is_file)

    def list(self, folder: str) -> list[StoredObject]:  # noqa: D102
        with _os_errors(f"{self._uri}/{folder}"):
            found = self._store().get_file_info_selector(folder, True, True)
        return sorted((StoredObject(info.path, info.size, (info.mtime_ns or 0) // 1_000_000) for info in found if info.is_file), key=lambda stored: stored.path)

    def delete(self, path: str) -> None:  # noqa: D102
        try:
            with _os_errors(f"{self._uri}/{path}"):
                self._store().delete_file(path)
        except FileNotFoundError:
            return


@contextmanager
def _os_errors(what: str) -> Iterator[None]:
    """The client's own errors as `OSError`, with the object's name; those that are one already stay."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{what}: {(str(error).strip().splitlines() or [type(error).__name__])[0]}") from error
