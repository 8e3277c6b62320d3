"""Credentials of AWS that follow the files which they come from.

botocore reads the credentials of a profile once. A worker runs for hours, and tools replace a
session key pair in the shared credentials file before it expires. Without this module, such a
worker would use the expired pair until its end.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import botocore.session
from botocore.credentials import (
    AssumeRoleCredentialFetcher,
    Credentials,
    DeferredRefreshableCredentials,
    create_credential_resolver,
)
from botocore.exceptions import BotoCoreError

_LOG: Final = logging.getLogger(__name__)
_FILES: Final = ("credentials_file", "config_file")

_State = tuple[tuple[int, ...] | None, ...]


def botocore_session(profile: str | None = None) -> botocore.session.Session:
    """Return a session of botocore whose credentials follow the files.

    Args:
        profile: Profile of the AWS configuration files. None: as the environment says.
    """
    session = botocore.session.Session(profile=profile)
    session.register_component("credential_provider", _Resolver(session, profile))
    return session


class _Resolver:
    """The credential provider of a session."""

    def __init__(self, session: botocore.session.Session, profile: str | None) -> None:
        self._session = session
        self._profile = profile

    def load_credentials(self) -> Credentials | None:
        """Return the credentials of the session; None if no source has any."""
        names = [str(self._session.get_config_variable(name)) for name in _FILES]
        # Not Path.expanduser, which fails for a user without a home directory
        paths = [os.path.expanduser(name) for name in names]  # noqa: PTH111
        found = FollowedCredentials(self._resolve, paths)
        return found if found.exist else None

    def _resolve(self) -> Credentials | None:
        # A new session, because a session keeps the content of the files.
        session = botocore.session.Session(profile=self._profile)
        found: Credentials | None = create_credential_resolver(session).load_credentials()
        return found


class FollowedCredentials(Credentials):
    """Credentials that are resolved again when one of the files changes. Thread-safe.

    Files that cannot be used (a writer is in the middle, a profile is missing) change nothing; the
    next call looks again.

    Args:
        resolve: Finds the credentials, as botocore does at the start of a process.
        paths: The files. A missing one may be created later.
    """

    def __init__(self, resolve: Callable[[], Credentials | None], paths: list[str]) -> None:
        self._resolve = resolve
        self._paths = paths
        self._lock = threading.Lock()
        self._state: _State = self._look()
        self._failure: str | None = None
        self._current = resolve()

    @property
    def exist(self) -> bool:
        """Whether a source has credentials."""
        return self._current is not None

    @property
    def access_key(self) -> Any:  # type: ignore[override] # (read only)
        """The access key id."""
        return self._used().access_key

    @property
    def secret_key(self) -> Any:  # type: ignore[override] # (read only)
        """The secret access key."""
        return self._used().secret_key

    @property
    def token(self) -> Any:  # type: ignore[override] # (read only)
        """The session token. None: the keys do not expire."""
        return self._used().token

    @property
    def account_id(self) -> Any:
        """The account, if the source names it."""
        return getattr(self._used(), "account_id", None)

    @property
    def method(self) -> Any:  # type: ignore[override] # (read only)
        """Where botocore found them."""
        return self._used().method

    def get_frozen_credentials(self) -> Any:
        """Return the keys and the token of one moment, which belong together."""
        return self._used().get_frozen_credentials()

    def _used(self) -> Any:
        with self._lock:
            state = self._look()
            if state != self._state:
                self._follow(state)
            return self._current

    def _follow(self, state: _State) -> None:
        try:
            found, reason = self._resolve(), "they have no credentials"
        except (BotoCoreError, OSError, ValueError) as error:
            found, reason = None, str(error)
        if found is not None:
            self._current, self._state, self._failure = found, state, None
            _LOG.info("read the AWS credentials again: %s changed", " or ".join(self._paths))
        elif reason != self._failure:
            self._failure = reason
            _LOG.warning("cannot use the changed AWS credentials files: %s", reason)

    def _look(self) -> _State:
        return tuple(map(_state_of, self._paths))


def _state_of(path: str) -> tuple[int, ...] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def s3_keys(
    role_arn: str | None = None,
    role_session_name: str | None = None,
    static_keys: tuple[str, str, str | None] | None = None,
    region_name: str | None = None,
) -> Callable[[], Mapping[str, str]] | None:
    """Return a function that returns the present keys, by their names in storage options.

    None: no source has credentials.

    Args:
        role_arn: A role to assume. Its credentials are renewed before they expire.
        role_session_name: Names the session of the role in the logs of AWS.
        static_keys: Access key id, secret access key and token that may assume the role. None: as
            botocore finds them.
        region_name: Region of the service that knows the role.
    """
    session = botocore_session()
    credentials: Any = (
        session.get_credentials() if static_keys is None else Credentials(*static_keys)
    )
    if credentials is None:
        return None
    if role_arn is not None:
        name = {"RoleSessionName": role_session_name or "kcl-pipeline"}
        create = partial(session.create_client, region_name=region_name)
        fetcher = AssumeRoleCredentialFetcher(create, credentials, role_arn, name)
        credentials = DeferredRefreshableCredentials(fetcher.fetch_credentials, "assume-role")

    def present() -> Mapping[str, str]:
        found = credentials.get_frozen_credentials()
        keys = {
            "access_key_id": str(found.access_key),
            "secret_access_key": str(found.secret_key),
        }
        return keys | ({"token": found.token} if found.token else {})

    return present
