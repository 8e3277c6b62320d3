"""The objects under a table's root, on a local disk or in an object store: read, write, list, delete.

Object stores are reached with the same storage options as the table's log, so that there is one set of settings and no second one to get wrong.
Nothing here is conditional: who writes an object that must not be overwritten gives it a name of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs as pafs

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

    def open(self, path: str) -> pa.NativeFile:
        """The object for reading parts of it; to be closed."""
        ...

    def write(self, path: str, data: bytes | memoryview) -> None:
        """Create or replace the object; a reader sees all of it or nothing."""
        ...

    def create(self, path: str) -> AbstractContextManager[pa.NativeFile]:
        """A stream to write the object with; it exists once the block has ended without an error, and not before."""
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

    def open(self, path: str) -> pa.NativeFile:  # noqa: D102
        return pa.OSFile(str(self.root / path))

    def write(self, path: str, data: bytes | memoryview) -> None:  # noqa: D102
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        partial.write_bytes(data)
        partial.replace(target)

    @contextmanager
    def create(self, path: str) -> Iterator[pa.NativeFile]:  # noqa: D102
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        try:
            with pa.OSFile(str(partial), "wb") as stream:
                yield stream
            partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

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
    """A prefix of an object store, through pyarrow's client.

    Not through delta-rs', which has one, too: it keeps the interpreter lock while it waits for the network, and a worker whose other threads stand still
    for the length of an upload loses its leases.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, str]) -> None:
        self._uri = uri
        self._options = {key.lower(): value for key, value in storage_options.items()}
        self._opened: tuple[pafs.FileSystem, str] | None = None

    def read(self, path: str) -> bytes:  # noqa: D102
        store, root = self._store()
        with _os_errors(f"{self._uri}/{path}"), store.open_input_stream(f"{root}/{path}") as stream:
            return bytes(stream.read())

    def open(self, path: str) -> pa.NativeFile:  # noqa: D102
        store, root = self._store()
        with _os_errors(f"{self._uri}/{path}"):
            return store.open_input_file(f"{root}/{path}")

    def write(self, path: str, data: bytes | memoryview) -> None:  # noqa: D102
        store, root = self._store()
        with _os_errors(f"{self._uri}/{path}"), store.open_output_stream(f"{root}/{path}") as stream:
            stream.write(data)

    @contextmanager
    def create(self, path: str) -> Iterator[pa.NativeFile]:  # noqa: D102
        # In memory first: a stream to the store that is closed by an error would leave a part of the object there.
        stream = pa.BufferOutputStream()
        yield stream
        self.write(path, memoryview(stream.getvalue()))

    def exists(self, path: str) -> bool:  # noqa: D102
        store, root = self._store()
        with _os_errors(f"{self._uri}/{path}"):
            return bool(store.get_file_info(f"{root}/{path}").type == pafs.FileType.File)

    def list(self, folder: str) -> list[StoredObject]:  # noqa: D102
        store, root = self._store()
        with _os_errors(f"{self._uri}/{folder}"):
            found = store.get_file_info(pafs.FileSelector(f"{root}/{folder}", recursive=True, allow_not_found=True))
        files = [info for info in found if info.type == pafs.FileType.File]
        return sorted(
            (StoredObject(info.path.removeprefix(f"{root}/"), info.size, (info.mtime_ns or 0) // 1_000_000) for info in files), key=lambda one: one.path
        )

    def delete(self, path: str) -> None:  # noqa: D102
        store, root = self._store()
        try:
            with _os_errors(f"{self._uri}/{path}"):
                store.delete_file(f"{root}/{path}")
        except FileNotFoundError:
            return

    def _store(self) -> tuple[pafs.FileSystem, str]:
        if self._opened is None:
            scheme, _, root = self._uri.partition("://")
            if scheme in ("s3", "s3a"):
                self._opened = pafs.S3FileSystem(**s3_settings(self._options)), root
            else:
                self._opened = pafs.FileSystem.from_uri(self._uri)
        return self._opened


def s3_settings(options: Mapping[str, str]) -> dict[str, Any]:
    """Settings of pyarrow for delta-rs' storage options (lower-case names, with or without `aws_`); what is not given comes from the environment, as there."""

    def given(*names: str) -> str | None:
        return next((options[key] for name in names for key in (f"aws_{name}", name) if key in options), None)

    endpoint = given("endpoint_url", "endpoint")
    settings = {
        "access_key": given("access_key_id"),
        "secret_key": given("secret_access_key"),
        "session_token": given("session_token"),
        "region": given("region", "default_region"),
        "endpoint_override": endpoint.partition("://")[2].rstrip("/") if endpoint else None,
        "scheme": "http" if endpoint and endpoint.startswith("http://") else None,
        "force_virtual_addressing": given("virtual_hosted_style_request") == "true" or None,
    }
    return {name: value for name, value in settings.items() if value is not None}


@contextmanager
def _os_errors(what: str) -> Iterator[None]:
    """The client's own errors as `OSError`, with the object's name; those that are one already stay."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{what}: {(str(error).strip().splitlines() or [type(error).__name__])[0]}") from error
