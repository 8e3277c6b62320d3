"""Processes that run seeds for a parent."""

from __future__ import annotations

import gc
import os
import signal
from multiprocessing import parent_process
from multiprocessing.connection import wait
from threading import Thread


def begin_process() -> None:
    """A process of a pool leaves interrupts to its parent, and ends with it: it would wait for
    ever for the work of a parent that was killed. Garbage is collected once per seed, when the
    whole world is garbage.
    """
    gc.freeze()
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
