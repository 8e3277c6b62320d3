"""Where a table is, how its store is reached, and the objects below its root.

1. What an error may say. The options of a store have secrets. An error of the Delta library becomes
   one line of limited length without them.
2. The options, as delta-rs and our own client read them, and the address of a table.
3. `Storage`: read, write, list and delete objects, on a disk or in an object store. No write is
   conditional, except `create_new`: other objects that must not be overwritten get unique names
   from their writers.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import uuid
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Final, Protocol, TypeVar
from urllib.parse import quote, unquote

import pyarrow as pa

from kcl_pipeline.errors import SinkError
from kcl_pipeline.settings_errors import without_credentials, wrong
from kcl_pipeline.sinks.log import ObjectStore, StoredObject, UnsafeObjectError
from kcl_pipeline.text import printable

MAX_LINE: Final = 500
"""Characters of another library's message that log lines and events contain."""

_SHORTEST_SECRET: Final = 6
_NO_SECRET: Final = re.compile(
    r"https?://[A-Za-z0-9._:\[\]-]+/?"  # an endpoint without user, path and query
    r"|[a-z]{2,4}(-[a-z]{2,12}){1,3}-[0-9]{1,2}"  # a region of AWS
)
"""Values without which an error could not be understood."""
_CAUSES: Final = 20
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_ARROW: Final = "↳"
_runtime_process: list[int] = []


@contextmanager
def delta_errors(doing: str, options: Mapping[str, str] | None = None) -> Iterator[None]:
    """Convert every error of delta-rs to `SinkError`, without the secrets in `options`.

    This includes its panics, which are no subclass of `Exception`, and a use after a fork.
    """
    if not _runtime_process:
        _runtime_process.append(os.getpid())
    if _runtime_process[0] != os.getpid():
        raise SinkError(
            f"{doing}: this process was forked from a process that used the Delta library, "
            "which does not work after a fork; "
            'start processes with multiprocessing.get_context("spawn")'
        )
    try:
        yield
    except (SinkError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except Exception as error:  # noqa: BLE001 (the library's errors have no common class)
        raise SinkError(f"{doing}: {first_line(error, options)}") from cause_of(error, options)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise SinkError(
            f"{doing}: the Delta library panicked: {first_line(error, options)}"
        ) from cause_of(error, options)


def first_line(error: BaseException, options: Mapping[str, str] | None = None) -> str:
    """The first line of an error's text, or its type: printable, at most `MAX_LINE` characters."""
    text = str(error).strip()[: 100 * MAX_LINE]
    for value in _values_in(text, options):
        text = text.replace(value, "***")
    lines = _COLOUR.sub("", without_credentials(text)).splitlines()
    if not lines:
        return type(error).__name__
    # delta-rs writes each cause on a line of its own.
    causes = [line.partition(_ARROW)[2].strip() for line in lines[1:] if _ARROW in line]
    return bounded(": ".join([lines[0], *causes]))


def cause_of(
    error: BaseException, options: Mapping[str, str] | None = None
) -> BaseException | None:
    """The error, for `raise ... from`; None if its text contains a value of the options.

    The errors that it was raised from are looked at, too: a traceback has them all.
    """
    known: BaseException | None = error
    for _ in range(_CAUSES):
        if known is None:
            return error
        text = f"{known}{known!r}"
        if _values_in(text, options) or without_credentials(text) != text:
            return None
        known = known.__cause__ or known.__context__
    return None


def _values_in(text: str, options: Mapping[str, str] | None) -> list[str]:
    """The values of the options that a text contains, the longest first.

    Which of them is a secret cannot be seen in the name of the option.
    """
    forms = {
        form
        for value in (options or {}).values()
        if len(value) >= _SHORTEST_SECRET and not _NO_SECRET.fullmatch(value)
        for form in (value, quote(value, safe=""), quote(value))
    }
    return sorted((form for form in forms if form in text), key=len, reverse=True)


def bounded(text: str) -> str:
    """A text from outside, printable and short enough for a log line."""
    return printable(text, MAX_LINE)


_ENDPOINTS: Final = ("endpoint_url", "endpoint")
_REGIONS: Final = ("region", "default_region")
_KEYS: Final = ("access_key_id", "secret_access_key", "session_token", "token")


class StorageOptions(UserDict[str, str]):
    """Storage options of delta-rs. They may contain keys and tokens, so `repr` has no values.

    The class is not a `dict`, because many tools print the values of dictionaries.
    """

    def __repr__(self) -> str:
        return f"StorageOptions({', '.join(f'{name}=***' for name in self)})"


def is_s3(uri: str) -> bool:
    """Whether the address is one of S3, or of a store with its interface."""
    return uri.startswith(("s3://", "s3a://"))


def delta_options(uri: str, options: Mapping[str, str] | None) -> dict[str, str]:
    """Return the options for delta-rs, completed from the environment as AWS's tools read it.

    For S3 these are the endpoint (`AWS_ENDPOINT_URL_S3`, then `AWS_ENDPOINT_URL`), the region, and
    HTTP if the endpoint has it. With an endpoint, delta-rs would read no profile and no role.
    """
    given = dict(options or {})
    if not is_s3(uri):
        return given
    endpoint = s3_option(given, *_ENDPOINTS) or (
        os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    )
    region = s3_option(given, *_REGIONS) or (
        os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    )
    completed = dict(given)
    if endpoint:
        completed = _without(completed, _ENDPOINTS) | {"AWS_ENDPOINT_URL": endpoint}
        if endpoint.startswith("http://") and s3_option(given, "allow_http") is None:
            completed["AWS_ALLOW_HTTP"] = os.environ.get("AWS_ALLOW_HTTP") or "true"
        if not has_own_keys(given) and s3_option(given, "force_credential_load") is None:
            completed["AWS_FORCE_CREDENTIAL_LOAD"] = "true"
    if region:
        completed = _without(completed, _REGIONS) | {"AWS_REGION": region}
    return completed


def has_own_keys(options: Mapping[str, str]) -> bool:
    """Whether the options or the environment have keys of S3, or say that nothing is signed."""
    unsigned = s3_option(options, "skip_signature") or os.environ.get("AWS_SKIP_SIGNATURE")
    return (
        (unsigned or "").lower() == "true"
        or s3_option(options, "access_key_id") is not None
        or bool(os.environ.get("AWS_ACCESS_KEY_ID"))
    )


def s3_option(options: Mapping[str, str], *names: str) -> str | None:
    """Return the first of some options of S3, in any case, with or without `aws_`; None: none."""
    found = {name.lower().removeprefix("aws_"): value for name, value in options.items()}
    return next((found[name] for name in names if found.get(name)), None)


def _without(options: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {
        name: value
        for name, value in options.items()
        if name.lower().removeprefix("aws_") not in names
    }


_SCHEME: Final = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")
_ESCAPE: Final = re.compile(r"%[0-9A-Fa-f]{2}")
"""delta-rs decodes it, the writer of a local file does not."""
_UNUSABLE: Final = re.compile(r"[\\\[\]|^]")
"""delta-rs reads a backslash as a slash, and panics at the others."""
_NOT_IN_URL: Final = re.compile(r"[?#]")
"""delta-rs ends the path of an URL here."""


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
        """Open the object to read ranges of it. The caller closes it."""

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


_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LINK_REFUSED: Final = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EMLINK})
_READ_BYTES: Final = 1024 * 1024
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
        blocks: list[bytes] = []
        length = 0
        while block := os.read(descriptor, _READ_BYTES):
            blocks.append(block)
            length += len(block)
            if limit is not None and length > limit:
                raise UnsafeObjectError(f"{path} has more than {limit} bytes")
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)
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
