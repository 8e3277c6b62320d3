"""Keep in a Python process of Spark what its next tasks need.

A process runs the tasks of many jobs, one after the other.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Final

from kcl_pipeline.delta.object_store import open_storage
from kcl_pipeline.delta.storage import Storage

_TABLES: Final = 16
"""Our own limit: more tables than the tasks of one process write at the same time."""


def table_storage(root: str, options: Mapping[str, str]) -> Storage:
    """Return the storage of a table, the same one for all tasks of this process.

    A new client of an object store would connect again for each task.
    """
    return _opened(root, tuple(sorted(options.items())))


@lru_cache(_TABLES)
def _opened(root: str, options: tuple[tuple[str, str], ...]) -> Storage:
    return open_storage(root, dict(options))


@cache
def settle(kind: str) -> None:  # noqa: ARG001 (once for each kind)
    """Exclude the objects of this process from later garbage collections, once for a kind of task.

    Spark collects garbage after each task. With the imported modules and a Kinesis client, this
    takes 30 ms of CPU time. Call it at the end of a task, which has loaded them.
    """
    gc.collect()
    gc.freeze()
