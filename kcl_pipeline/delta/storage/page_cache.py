"""Keep large files of a local table out of the page cache.

Data files are written once, and mostly read later by other programs. Without advice the kernel
keeps all their pages until memory is short. A worker that writes fast then always needs new pages.
They cost more CPU time than pages that are used again, mostly on a virtual machine whose host
provides memory on demand, and they displace pages of other programs.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

LARGE_BYTES: Final = 1024 * 1024
"""Smaller files stay in the cache: they cost little, and a program may wait for them."""
WAITING_BYTES: Final = 128 * 1024 * 1024
"""Bytes of files that wait. The kernel drops only pages that it has written to the disk."""
_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class WrittenFiles:
    """Files of one table whose pages are dropped after others were written. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Path, int]] = deque()
        self._bytes = 0

    def add(self, path: Path) -> None:
        """Let the kernel start to write a new file, and drop the pages of older ones.

        A file that was removed meanwhile has no pages, and a system without this advice keeps them.
        """
        size = drop_pages(path, at_least=LARGE_BYTES)
        if not size:
            return
        with self._lock:
            self._waiting.append((path, size))
            self._bytes += size
            due = []
            while self._bytes - self._waiting[0][1] >= WAITING_BYTES:
                oldest, its = self._waiting.popleft()
                self._bytes -= its
                due.append(oldest)
        for one in due:
            drop_pages(one)


def drop_pages(path: Path, at_least: int = 0) -> int:
    """Drop the pages of a file that are on the disk, and start to write the others.

    Returns:
        Size of the file in bytes; 0 if it is smaller than `at_least`, or nothing was done.
    """
    with suppress(OSError, AttributeError):
        descriptor = os.open(path, _FLAGS)
        try:
            size = os.fstat(descriptor).st_size
            if size >= at_least:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                return size
        finally:
            os.close(descriptor)
    return 0
