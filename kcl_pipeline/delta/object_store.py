"""Open the storage of a table; access objects of an object store: S3, Google Cloud Storage, Azure.

obstore has the clients of the Rust crate that delta-rs uses. So the files and the announcements
are where the log is, with the same options. Unlike delta-rs it does not hold the interpreter lock
while it waits for the network: during an upload the other threads run, and the worker keeps its
leases.
"""

from __future__ import annotations

import io
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import obstore
import pyarrow as pa
from obstore.exceptions import (
    AlreadyExistsError,
    NotSupportedError,
    PreconditionError,
    UnknownConfigurationKeyError,
)
from obstore.store import from_url

from kcl_pipeline.delta.storage import (
    LocalStorage,
    Storage,
    cause_of,
    delta_options,
    first_line,
    has_own_keys,
    is_local,
    is_s3,
    local_path,
    s3_option,
)
from kcl_pipeline.sinks.log import StoredObject, UnsafeObjectError
from kcl_pipeline.threads import DaemonPool

_CLIENT: Final = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "default_headers",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_url",
        "proxy_ca_certificate",
        "proxy_excludes",
        "root_certificate",
        "randomize_addresses",
        "read_timeout",
        "timeout",
        "user_agent",
    }
)
"""Options of the HTTP client, which obstore takes apart from those of the store."""
_PREFIXES: Final = ("aws_", "azure_storage_", "azure_", "google_")
PROBE_FOLDER: Final = "_kcl_pipeline/probe"
_ROLES: Final = ("iam_role_arn", "s3_assume_role_arn")
_ROLE_SESSIONS: Final = ("iam_role_session_name", "s3_role_session_name")
_BUFFER_BYTES: Final = 1024 * 1024
_CALLS: Final = 32
"""Requests of a table at a time. They wait for the network."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def open_storage(uri: str, storage_options: Mapping[str, str] | None = None) -> Storage:
    """Open the storage below `uri`, on this machine or in an object store."""
    if is_local(uri):
        return LocalStorage(local_path(uri))
    return ObjectStorage(uri.rstrip("/"), dict(storage_options or {}))


class ObjectStorage:
    """The `Storage` of a prefix of an object store. Thread-safe."""

    def __init__(self, uri: str, storage_options: Mapping[str, str]) -> None:
        self._uri = uri
        self._options = dict(storage_options)
        self._lock = threading.Lock()
        self._opened: Any = None
        self._creates_once = False
        self._pool: DaemonPool | None = None

    # The protocol `Storage` documents these methods.
    def read(self, path: str, limit: int | None = None) -> bytes:  # noqa: D102
        with self._at(path) as store:
            found = obstore.get(store, path)
            if limit is not None and found.meta["size"] > limit:
                raise UnsafeObjectError(f"{path} has more than {limit} bytes")
            return bytes(found.bytes())

    def read_each(  # noqa: D102
        self, folder: str, names: Iterable[str], limit: int
    ) -> Iterator[tuple[str, bytes | OSError]]:
        def read(path: str) -> tuple[str, bytes | OSError]:
            try:
                return path, self.read(path, limit)
            except OSError as error:
                return path, error

        yield from self.map(read, [f"{folder}/{name}" for name in names])

    def map(  # noqa: D102
        self, call: Callable[[_Item], _Result], items: Sequence[_Item]
    ) -> Sequence[_Result]:
        if len(items) < 2:  # noqa: PLR2004 (one item needs no thread)
            return [call(item) for item in items]
        with self._lock:
            self._pool = self._pool or DaemonPool(_CALLS, "objects")
        return self._pool.map(call, items)

    def open(self, path: str) -> pa.NativeFile:  # noqa: D102
        with self._at(path) as store:
            size = int(obstore.head(store, path)["size"])

        def part(start: int, end: int) -> bytes:
            with self._at(path) as store:
                return bytes(obstore.get_range(store, path, start=start, end=end))

        return pa.PythonFile(io.BufferedReader(_ObjectFile(size, part), _BUFFER_BYTES), mode="r")

    @contextmanager
    def create(  # noqa: D102
        self,
        path: str,
        *,
        durable: bool = True,  # noqa: ARG002 (what a store has, it keeps)
    ) -> Iterator[pa.NativeFile]:
        # Written to memory first, so that an error leaves no object.
        stream = pa.BufferOutputStream()
        yield stream
        with self._at(path) as store:
            obstore.put(store, path, memoryview(stream.getvalue()).cast("B"))

    def create_new(self, path: str, data: bytes) -> None:  # noqa: D102
        with self._at(path) as store:
            try:
                obstore.put(store, path, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                raise FileExistsError(f"{self._uri}/{path} exists") from None

    def size(self, path: str) -> int | None:  # noqa: D102
        try:
            with self._at(path) as store:
                return int(obstore.head(store, path)["size"])
        except FileNotFoundError:
            return None

    def list(  # noqa: D102
        self,
        folder: str,
        limit: int | None = None,
        *,
        partial: bool = False,  # noqa: ARG002 (an object of the store is complete or not there)
        after: str = "",
    ) -> list[StoredObject]:
        found: list[StoredObject] = []
        with self._at(folder) as store:
            for chunk in obstore.list(store, folder.strip("/") or None, offset=after or None):
                found += [
                    StoredObject(one["path"], one["size"], _millis(one["last_modified"]))
                    for one in chunk
                ]
                if limit is not None and len(found) >= limit:
                    break
        return sorted(found[:limit], key=lambda stored: stored.path)

    def delete(self, *paths: str) -> None:  # noqa: D102
        try:
            with self._at(", ".join(paths[:1])) as store:
                obstore.delete(store, list(paths))
        except FileNotFoundError:  # not S3: its request for several objects ignores missing ones
            for path in paths if len(paths) > 1 else ():
                self.delete(path)

    def creates_once(self) -> bool:
        """Find out whether the store refuses to create an object that exists.

        Writes one small object twice, and deletes it. Does so until the store has refused once.

        Raises:
            OSError: The store cannot be used now.
        """
        if not self._creates_once:
            path = f"{PROBE_FOLDER}/{uuid.uuid4().hex}"
            try:
                self.create_new(path, b"1")
                self.create_new(path, b"2")
            except FileExistsError:
                self._creates_once = True
            except (NotSupportedError, NotImplementedError):
                return False
            self.delete(path)
        return self._creates_once

    @contextmanager
    def _at(self, path: str) -> Iterator[Any]:
        """The store. Its errors become `OSError` with the address, and without values of options.

        `path` is the object, for the message.
        """
        try:
            with self._lock:
                if self._opened is None:
                    self._opened = open_store(self._uri, self._options)
            yield self._opened
        except FileNotFoundError:
            raise FileNotFoundError(f"{self._uri}/{path} does not exist") from None
        except (UnsafeObjectError, FileExistsError, NotSupportedError):
            raise
        except Exception as error:  # noqa: BLE001 (the client's errors have no common class)
            message = f"{self._uri}/{path}: {first_line(error, self._options)}"
            raise OSError(message) from cause_of(error, self._options)


class _ObjectFile(io.RawIOBase):
    """A file whose parts are read when they are needed."""

    def __init__(self, size: int, part: Callable[[int, int], bytes]) -> None:
        self._size = size
        self._part = part
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = max(start + offset, 0)
        return self._place

    def readinto(self, buffer: Any) -> int:
        end = min(self._place + len(buffer), self._size)
        if end <= self._place:
            return 0
        found = self._part(self._place, end)
        buffer[: len(found)] = found
        self._place += len(found)
        return len(found)


def open_store(uri: str, options: Mapping[str, str]) -> Any:
    """Open the store of an address with the options of delta-rs.

    Options that only delta-rs knows are left out.

    Raises:
        Exception: An option or the address cannot be used.
    """
    completed = delta_options(uri, options)
    own: dict[str, Any] = {}
    if is_s3(uri) and (s3_option(options, *_ROLES) or not has_own_keys(options)):
        own["credential_provider"] = _aws_keys(completed)
    client: Any = {}
    config: Any = {}
    for name, value in completed.items():
        plain = _plain(name)
        if plain in _CLIENT:
            client[plain] = value
        elif _is_known(uri, name.lower(), value):
            config[name.lower()] = value
    return from_url(
        uri, config=config, client_options=client, **{k: v for k, v in own.items() if v is not None}
    )


def _plain(name: str) -> str:
    lower = name.lower()
    return next((lower.removeprefix(p) for p in _PREFIXES if lower.startswith(p)), lower)


def _is_known(uri: str, name: str, value: str) -> bool:
    try:
        config: Any = {name: value}
        from_url(uri, config=config)
    except UnknownConfigurationKeyError:
        return False
    except Exception:  # noqa: BLE001 (it is known; the store of all options shows what is wrong)
        return True
    return True


def _aws_keys(options: Mapping[str, str]) -> Callable[[], Mapping[str, Any]] | None:
    """Return what asks for the present keys before each request. None: there are none."""
    # boto3 is loaded only where no keys are given.
    from kcl_pipeline.aws.credentials import s3_keys  # noqa: PLC0415

    key, secret = (s3_option(options, n) for n in ("access_key_id", "secret_access_key"))
    own = (key, secret, s3_option(options, "session_token", "token")) if key and secret else None
    present = s3_keys(
        s3_option(options, *_ROLES),
        s3_option(options, *_ROLE_SESSIONS),
        own,
        s3_option(options, "region"),
    )
    if present is None:
        return None
    # They expire at once, so that the store asks each time: botocore refreshes them.
    return lambda: {**present(), "expires_at": datetime.now(UTC)}


def _millis(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)
