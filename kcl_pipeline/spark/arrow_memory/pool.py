"""Memory files that the batches of a writer use one after the other.

The kernel clears every page of a new file, and frees it after the batch. Both took a fifth of the
processor time of a batch. So the files of a batch are kept for the next one, within the memory
budget of the worker.

A file is only used again when nobody reads or writes it. Its owner states whether a task of Spark
may still do so. Whether a table in this process still has bytes of the file is known here. A file
that is not used again keeps its bytes until the last reader has ended.

The files are anonymous (`memfd_create`), so the kernel frees them when the last process that uses
them ends, also after `kill -9`. Without a process that ends, they are freed with the pool.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import pyarrow as pa

from kcl_pipeline.memory import MemoryBudget

HEADER_BYTES: Final = 64
"""A file begins with the token of its batch."""


def header(token: str) -> bytes:
    """The beginning of a file of this batch."""
    return token.encode().ljust(HEADER_BYTES)


class MemoryFile:
    """A file in memory. It never becomes smaller, because others may have mapped it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.descriptor = os.memfd_create(name)
        weakref.finalize(self, os.close, self.descriptor)
        self._mapping: mmap.mmap | None = None
        self._uses: list[weakref.ref[memoryview]] = []

    @property
    def path(self) -> str:
        """A path by which other processes open the file."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @property
    def size(self) -> int:
        """Bytes that the file has."""
        return os.fstat(self.descriptor).st_size

    def start(self, token: str) -> None:
        """Write the header."""
        os.pwrite(self.descriptor, header(token), 0)

    def grow(self, size: int) -> None:
        """Make the file at least as large.

        Raises:
            OSError: There is no memory. A write to a mapped page would end the process instead.
        """
        if size > self.size:
            os.posix_fallocate(self.descriptor, 0, size)

    def target(self) -> pa.NativeFile:
        """Open the file for writing in place, from its beginning."""
        return pa.FixedSizeBufferWriter(pa.py_buffer(self._mapped(self.size)))

    def buffer(self, size: int) -> pa.Buffer:
        """The first bytes of the file, without a copy. `is_used` while the buffer exists."""
        use = memoryview(self._mapped(size))
        self._uses.append(weakref.ref(use))
        return pa.foreign_buffer(pa.py_buffer(use).address, size, use)

    def is_used(self) -> bool:
        """Whether buffers of the file exist, or tables over them."""
        self._uses = [use for use in self._uses if use() is not None]
        return bool(self._uses)

    def _mapped(self, size: int) -> mmap.mmap:
        """A mapping with at least these bytes, kept because new page tables take time."""
        if self._mapping is None or len(self._mapping) < size:
            self._mapping = mmap.mmap(self.descriptor, self.size)
        return self._mapping


class MemoryPool:
    """Keep memory files for the next batch.

    Args:
        budget: Counts all files, those in use included. Files that are not in use are freed first.
            A batch may exceed the limit, but then nothing is kept.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._free: list[MemoryFile] = []
        self._taken: list[MemoryFile] = []
        self._counted = 0
        budget.on_need(self.reclaim)

    def take(self, name: str, sizes: Sequence[int]) -> list[MemoryFile]:
        """Return files with at least these sizes. Their contents are arbitrary.

        Raises:
            OSError: There is no memory.
        """
        with self._lock:
            kept = [file for file in self._free if file.name == name][: len(sizes)]
            self._free = [file for file in self._free if file not in kept]
            files = list(kept)
            try:
                files += [MemoryFile(name) for _ in sizes[len(kept) :]]
                self._taken += files
                more = sum(
                    max(size - file.size, 0) for size, file in zip(sizes, files, strict=True)
                )
                self._shrink(more)
                self._count(more)
                for size, file in zip(sizes, files, strict=True):
                    file.grow(size)
            except OSError:
                self._taken = [file for file in self._taken if file not in files]
                self._count()
                raise
            return files

    def give_back(self, files: Sequence[MemoryFile], *, is_ended: bool) -> None:
        """End the use of files.

        Args:
            files: Files from `take`.
            is_ended: Whether no task can read or write them any more.
        """
        with self._lock:
            self._taken = [file for file in self._taken if file not in files]
            if is_ended:
                kept = [file for file in files if not file.is_used()]
                self._free = kept + self._free
            self._count()
            self._shrink()

    @contextmanager
    def growing(self) -> Iterator[int]:
        """Yield the bytes by which files may grow while the context lasts; 0 without any."""
        room = self._budget.reserve_result()
        try:
            yield room
        finally:
            with self._lock:
                self._count(result=-room)

    def reclaim(self, missing: int) -> None:
        """Free files that are not in use, until this many bytes are free. Does not wait."""
        if self._lock.acquire(blocking=False):
            try:
                while self._free and missing > 0:
                    missing -= self._free_largest()
            finally:
                self._lock.release()

    # The methods below need the lock.

    def _count(self, more: int = 0, result: int = 0) -> None:
        """Count the files, and as many bytes more, and change the reserved bytes in one step."""
        size = sum(file.size for file in (*self._free, *self._taken)) + more
        self._budget.change({"files": size - self._counted, "result": result})
        self._counted = size

    def _shrink(self, more: int = 0) -> None:
        """Free files that are not in use until as many bytes more fit."""
        while self._free and self._budget.used_bytes + more > self._budget.max_bytes:
            self._free_largest()

    def _free_largest(self) -> int:
        largest = max(self._free, key=lambda file: file.size)
        size = largest.size
        self._free.remove(largest)
        self._counted -= size
        self._budget.change({"files": -size})
        return size
