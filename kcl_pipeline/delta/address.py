"""Where a table is, and with which options its store is reached: its log as its files."""

from __future__ import annotations

import os
import re
from collections import UserDict
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from kcl_pipeline.settings_errors import wrong

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
