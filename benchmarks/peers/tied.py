"""Becomes a command that ends when the process that started it does, however that ends: `python
tied.py COMMAND…`. Linux keeps the tie through `exec`.

A consumer that outlives the benchmark goes on taking a core, and spoils the figures of everything
that is measured later.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def tied(command: list[str]) -> list[str]:
    """The command, tied to this process (to the thread that starts it, to be exact)."""
    return [sys.executable, str(Path(__file__).resolve()), str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> None:
    """Tie, look whether the parent is still there, become the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
