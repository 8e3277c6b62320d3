"""Set-up of the processes that run seeds for a parent process."""

from __future__ import annotations

import gc
import os
import signal
from multiprocessing import parent_process
from multiprocessing.connection import wait
from threading import Thread


def begin_process() -> None:
    """Prepare a process of a pool.

    Interrupts are left to the parent. The process ends with its parent; otherwise it would wait
    forever for work after the parent is killed. Garbage is collected once per seed, when the whole
    world is garbage.
    """
    gc.freeze()
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
