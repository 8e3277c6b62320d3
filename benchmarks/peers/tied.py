"""Wrapper that ends a command when its parent process ends.

Usage: `python tied.py COMMAND…`. Linux keeps the parent-death signal across `exec`. A consumer that
outlives the benchmark uses a core and distorts all later measurements.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def tied(command: list[str]) -> list[str]:
    """Return the command with this wrapper.

    The command ends when the thread that started it ends.
    """
    return [sys.executable, str(Path(__file__).resolve()), str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> None:
    """Set the parent-death signal, check that the parent still runs, and execute the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
