"""Where a table is, with which options its store is reached, and what its errors may say.

The options have secrets. An error of the Delta library becomes one line of limited length without
them.
"""

from __future__ import annotations

import os
import re
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from kcl_pipeline.errors import SinkError
from kcl_pipeline.settings_errors import without_credentials, wrong
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
