"""Errors that this package does not expect: they keep their type, and the log has their traceback.

An error of one shard, row or stream does not stop the others, so it becomes an event and the step
is repeated. The text of an event has no room for a traceback, and `KeyError('x')` as `'x'` looks
like trouble with AWS.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from kcl_pipeline.errors import KclError

_LOG: Final = logging.getLogger(__name__)
MAX_CAUSES: Final = 1_000
"""Causes that are remembered. Further ones are logged each time."""

_lock: Final = threading.Lock()
_logged: Final[set[tuple[type[BaseException], str, int]]] = set()


def described(error: BaseException, what: str) -> str:
    """Return the text of an error for an event, and log an unexpected one once per cause.

    A cause is the type of the error and the line that raised it.

    Args:
        error: The error.
        what: The step that failed, for the log.
    """
    if isinstance(error, KclError):
        return str(error)
    if _is_new(error):
        _LOG.error("unexpected error in %s; it is logged once", what, exc_info=error)
    return f"{type(error).__name__}: {error}"


def _is_new(error: BaseException) -> bool:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    file, line = ("", 0) if place is None else (place.tb_frame.f_code.co_filename, place.tb_lineno)
    cause = (type(error), file, line)
    with _lock:
        if cause in _logged:
            return False
        if len(_logged) < MAX_CAUSES:
            _logged.add(cause)
        return True
