"""The memory, threads and files of a worker's processes, as the operating system counts them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

POOL_THREAD = "tokio-rt-worker"
SOCKET = "socket:"
MEMORY_FILE = "/memfd:"
BLOCK_BYTES = 512


def look(driver: psutil.Process, heap_mb: float | None) -> dict[str, float]:
    """Return the current resources of the driver and its descendants."""
    below = driver.children(recursive=True)
    jvms = [process for process in below if process.name() == "java"]
    names = thread_names(driver.pid)
    pool = names.count(POOL_THREAD)
    sockets = socket_count(driver.pid)
    sample = {
        "driver_mb": driver.memory_info().rss / 1e6,
        "driver_threads": len(names) - pool,
        "delta_threads": pool,
        "driver_files": driver.num_fds() - sockets,
        "driver_sockets": sockets,
    }
    for jvm in jvms[:1]:
        workers = [p for p in jvm.children(recursive=True) if p.name().startswith("python")]
        sample |= {
            "jvm_mb": jvm.memory_info().rss / 1e6,
            "jvm_threads": jvm.num_threads(),
            "jvm_files": jvm.num_fds(),
            "python_workers_mb": sum(p.memory_info().rss for p in workers) / 1e6,
            "memory_files_mb": memory_file_bytes([driver.pid, jvm.pid]) / 1e6,
        }
        if heap_mb is not None:
            sample["jvm_heap_mb"] = heap_mb
    return sample


def socket_count(pid: int) -> int:
    """Return the number of open sockets of a process."""
    count = 0
    for link in _entries(pid, "fd"):
        with suppress(OSError):  # it was closed meanwhile
            count += str(link.readlink()).startswith(SOCKET)
    return count


def thread_names(pid: int) -> list[str]:
    """Return the names of a process's threads from the operating system."""
    names = []
    for file in Path(f"/proc/{pid}/task").glob("*/comm"):
        with suppress(OSError):  # it has ended meanwhile
            names.append(file.read_text().strip())
    return names


def memory_file_bytes(pids: Iterable[int]) -> int:
    """Return the bytes of all memory files that these processes have open or mapped.

    A file that several processes use counts once. The files count also after they were closed, as
    long as a process maps them: the kernel keeps their pages.
    """
    found: dict[int, int] = {}
    for pid in pids:
        for link in (*_entries(pid, "fd"), *_entries(pid, "map_files")):
            with suppress(OSError):  # it was closed meanwhile
                if str(link.readlink()).startswith(MEMORY_FILE):
                    status = link.stat()
                    found[status.st_ino] = status.st_blocks * BLOCK_BYTES
    return sum(found.values())


def _entries(pid: int, name: str) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/{name}").iterdir())
    except OSError:  # the process has ended, or belongs to another user
        return []
