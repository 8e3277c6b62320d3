"""Storage options: how a table's store is reached, for its log as for its files."""

from __future__ import annotations

import os
from collections import UserDict
from collections.abc import Mapping
from typing import Final

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
