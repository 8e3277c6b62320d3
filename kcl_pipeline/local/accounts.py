"""Accounts of the embedded AWS: which account a request is for.

An access key of 12 digits is the number of its account. Every other access key is of the default
account. A Kinesis request with an ARN of an account that exists is for that account, as if the
stream had a resource policy for everyone.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.local.http.messages import Request
from kcl_pipeline.local.kinesis.handler import KinesisHandler
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.kinesis.state import KinesisSettings

_ACCESS_KEY: Final = re.compile(r"Credential=(\d{12})/", re.ASCII)
# In JSON, and in CBOR, where a text of up to 255 bytes begins with 0x78 and its length
_ARN: Final = re.compile(
    rb"(?:Stream|Consumer|Resource)ARN(?:\"\s*:\s*\"|\x78.)arn:aws:kinesis:[a-z0-9-]+:(\d{12}):",
    re.DOTALL,
)


def account_of(request: Request) -> str | None:
    """Return the account of the access key that signed a request; None: the default account."""
    found = _ACCESS_KEY.search(request.headers.get("authorization", ""))
    return found.group(1) if found else None


class KinesisAccounts:
    """The Kinesis models of all accounts. An account exists after its first request. Thread-safe.

    Args:
        clock: The clock of all models.
        settings: The settings of all models. `account` is the default account.
    """

    def __init__(self, clock: Clock, settings: KinesisSettings) -> None:
        self._clock = clock
        self._settings = settings
        self._guard = threading.Lock()
        self.default = KinesisHandler(KinesisModel(clock, settings))
        self._handlers = {settings.account: self.default}

    def start(self) -> None:
        """Permit subscriptions to wait for new records."""
        self._each(KinesisHandler.start)

    def stop(self) -> None:
        """End all subscriptions."""
        self._each(KinesisHandler.stop)

    def _each(self, call: Callable[[KinesisHandler], None]) -> None:
        with self._guard:
            handlers = list(self._handlers.values())
        for handler in handlers:
            call(handler)

    def handler(self, request: Request) -> KinesisHandler:
        """Return the handler of the account that a request is for."""
        account = account_of(request) or self._settings.account
        with self._guard:
            if account not in self._handlers:
                settings = replace(self._settings, account=account)
                self._handlers[account] = KinesisHandler(KinesisModel(self._clock, settings))
            if len(self._handlers) > 1 and (named := _ARN.search(request.body)) is not None:
                account = named.group(1).decode() if self._has(named.group(1)) else account
            return self._handlers[account]

    def _has(self, account: bytes) -> bool:
        return account.decode() in self._handlers
