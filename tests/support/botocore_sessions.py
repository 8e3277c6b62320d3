"""Sessions of botocore that are cheap to make.

A session registers the 130 handlers of botocore, and inspects the signature and looks up the name
of each: that is three quarters of the time of a session and its first client. Here a session begins
with a copy of the handlers of another one, as a client does with those of its session.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import botocore.session
from botocore import handlers
from botocore.hooks import HierarchicalEmitter

_Session = botocore.session.Session


@functools.cache
def _registered(count: int) -> HierarchicalEmitter:
    """Return all handlers of botocore. `count`: how many there are, because moto adds one."""
    emitter = HierarchicalEmitter()
    _Session(event_hooks=emitter)
    return emitter


class SharingSession(_Session):
    """A session with a copy of the registered handlers."""

    def __init__(
        self,
        session_vars: Any = None,
        event_hooks: Any = None,
        include_builtin_handlers: bool = True,
        profile: Any = None,
    ) -> None:
        if event_hooks is None and include_builtin_handlers:
            event_hooks = copy.copy(_registered(len(handlers.BUILTIN_HANDLERS)))
            include_builtin_handlers = False
        super().__init__(session_vars, event_hooks, include_builtin_handlers, profile)


def share_handlers() -> None:
    """Let all sessions of this process be such sessions."""
    botocore.session.Session = SharingSession
