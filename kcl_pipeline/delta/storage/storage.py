"""Read, write, list and delete objects below a table's root, on a disk or in an object store.

Object stores use the same storage options as the table's log. No write is conditional: an object
that must not be overwritten gets a unique name from its writer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs as pafs

from kcl_pipeline.delta.errors import cause_of, first_line
from kcl_pipeline.delta.storage.local import LocalStorage
from kcl_pipeline.delta.storage.objects import StoredObject, UnsafeObjectError

_SCHEME: Final = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")


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

    def create(self, path: str) -> AbstractContextManager[pa.NativeFile]:
        """Open a stream that creates or replaces the object atomically.

        The object exists after the `with` block has ended without an error.
        """

    def size(self, path: str) -> int | None:
        """The object's size in bytes; None if it does not exist or is not a regular file."""

    def list(
        self, folder: str, limit: int | None = None, *, partial: bool = False
    ) -> list[StoredObject]:
        """List the objects below a folder at any depth, sorted by path.

        Objects that are not regular files are included. A missing folder gives an empty list.

        Args:
            folder: Path of the folder.
            limit: Most objects to return; which ones is not defined.
            partial: Include objects that are being written, or that a killed process was writing.
        """

    def delete(self, path: str) -> None:
        """Remove the object, if it exists."""


def is_local(uri: str) -> bool:
    """Whether the URI is a path on this machine: a plain path or `file://`."""
    return uri.startswith("file:") or not _SCHEME.match(uri)


def local_path(uri: str) -> Path:
    """The absolute path of a local URI."""
    path = unquote(re.sub(r"^file:(//)?", "", uri)) if uri.startswith("file:") else uri
    return Path(path).expanduser().absolute()


def table_root(uri: str) -> str:
    """Normalize the URI: an absolute path for a local one, without a slash at the end."""
    return str(local_path(uri)) if is_local(uri) else uri.rstrip("/")


def open_storage(uri: str, storage_options: Mapping[str, str] | None = None) -> Storage:
    """Open the storage below `uri`."""
    return (
        LocalStorage(local_path(uri))
        if is_local(uri)
        else ObjectStorage(uri.rstrip("/"), dict(storage_options or {}))
    )


class ObjectStorage:
    """A prefix of an object store, through pyarrow's client.

    The client of delta-rs is not used: it holds the interpreter lock while it waits for the
    network. During an upload the other threads would not run, and the worker would lose its leases.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, str]) -> None:
        self._uri = uri
        self._options = {key.lower(): value for key, value in storage_options.items()}
        self._opened: tuple[pafs.FileSystem, str] | None = None

    # The protocol `Storage` documents these methods.
    def read(self, path: str, limit: int | None = None) -> bytes:  # noqa: D102
        with self._at(path) as (store, inner), store.open_input_stream(inner) as stream:
            data = bytes(stream.read() if limit is None else stream.read(limit + 1))
        if limit is not None and len(data) > limit:
            raise UnsafeObjectError(f"{path} has more than {limit} bytes")
        return data

    def read_each(  # noqa: D102
        self, folder: str, names: Iterable[str], limit: int
    ) -> Iterator[tuple[str, bytes | OSError]]:
        for name in names:
            path = f"{folder}/{name}"
            try:
                yield path, self.read(path, limit)
            except OSError as error:
                yield path, error

    def open(self, path: str) -> pa.NativeFile:  # noqa: D102
        with self._at(path) as (store, inner):
            return store.open_input_file(inner)

    @contextmanager
    def create(self, path: str) -> Iterator[pa.NativeFile]:  # noqa: D102
        # Written to memory first: an error would close a stream to the store and leave a partial
        # object.
        stream = pa.BufferOutputStream()
        yield stream
        with self._at(path) as (store, inner), store.open_output_stream(inner) as target:
            target.write(stream.getvalue())

    def size(self, path: str) -> int | None:  # noqa: D102
        with self._at(path) as (store, inner):
            found = store.get_file_info(inner)
        return int(found.size) if found.type == pafs.FileType.File else None

    def list(  # noqa: D102
        self,
        folder: str,
        limit: int | None = None,
        *,
        partial: bool = False,  # noqa: ARG002 (an object of the store is complete or not there)
    ) -> list[StoredObject]:
        with self._at(folder) as (store, inner):
            found = store.get_file_info(
                pafs.FileSelector(inner, recursive=True, allow_not_found=True)
            )
        root = inner.removesuffix(folder)
        files = [
            StoredObject(info.path.removeprefix(root), info.size, (info.mtime_ns or 0) // 1_000_000)
            for info in found
            if info.type == pafs.FileType.File
        ]
        return sorted(files[:limit], key=lambda one: one.path)

    def delete(self, path: str) -> None:  # noqa: D102
        with suppress(FileNotFoundError), self._at(path) as (store, inner):
            store.delete_file(inner)

    @contextmanager
    def _at(self, path: str) -> Iterator[tuple[pafs.FileSystem, str]]:
        """The store, and the object's path in it. Its errors become `OSError` with the address."""
        if self._opened is None:
            scheme, _, root = self._uri.partition("://")
            if scheme in ("s3", "s3a"):
                self._opened = pafs.S3FileSystem(**s3_settings(self._options)), root
            else:
                self._opened = pafs.FileSystem.from_uri(self._uri)
        store, root = self._opened
        try:
            yield store, f"{root}/{path}"
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 (the client's errors have no common class)
            message = f"{self._uri}/{path}: {first_line(error, self._options)}"
            raise OSError(message) from cause_of(error, self._options)


def s3_settings(options: Mapping[str, str]) -> dict[str, Any]:
    """Convert storage options of delta-rs to arguments of pyarrow's S3 client.

    Names are lower case, with or without `aws_`. Other values come from the environment, as in
    delta-rs.
    """

    def given(*names: str) -> str | None:
        return next(
            (options[key] for name in names for key in (f"aws_{name}", name) if key in options),
            None,
        )

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
