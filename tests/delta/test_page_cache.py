"""Pages of large files that were written leave the cache; small and removed files do no harm."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from kcl_pipeline.delta import storage as page_cache
from kcl_pipeline.delta.storage import LARGE_BYTES, LocalStorage, drop_pages
from tests.support.delta_tables import put

LARGE = bytes(LARGE_BYTES)


@pytest.fixture
def advised(monkeypatch, tmp_path):
    """The names of the files whose pages were dropped, in order."""
    names = []

    def note(descriptor, offset, length, advice):
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        names.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "posix_fadvise", note)
    monkeypatch.setattr(page_cache, "WAITING_BYTES", 2 * LARGE_BYTES)
    return names


def test_a_file_is_dropped_again_after_others_were_written(tmp_path, advised):
    storage = LocalStorage(tmp_path)
    for name in "abcd":
        put(storage, f"batches/{name}", LARGE)
    assert advised == ["a", "b", "c", "a", "d", "b"]


def test_small_files_stay(tmp_path, advised):
    storage = LocalStorage(tmp_path)
    put(storage, "small", LARGE[1:])
    for name in "abc":
        put(storage, name, LARGE)
    assert advised == ["a", "b", "c", "a"]


def test_a_file_that_was_removed_is_passed_over(tmp_path, advised):
    storage = LocalStorage(tmp_path)
    put(storage, "a", LARGE)
    storage.delete("a")
    for name in "bcd":
        put(storage, name, LARGE)
    assert advised == ["a", "b", "c", "d", "b"]


def test_a_link_is_not_followed(tmp_path, advised):
    (tmp_path / "other").write_bytes(LARGE)
    (tmp_path / "link").symlink_to("other")
    assert drop_pages(tmp_path / "link") == 0
    assert advised == []


def test_a_system_without_this_advice_keeps_the_pages(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise")
    storage = LocalStorage(tmp_path)
    put(storage, "a", LARGE)
    assert storage.read("a") == LARGE


def test_the_pages_of_a_file_on_the_disk_leave_the_memory(tmp_path):
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.write(LARGE)
        file.flush()
        os.fsync(file.fileno())
        is_in_memory_only = b"tmpfs" in _file_system(path)
    before = _resident(path)
    assert drop_pages(path) == LARGE_BYTES
    assert before == LARGE_BYTES // mmap.PAGESIZE
    assert _resident(path) == (before if is_in_memory_only else 0)
    assert path.read_bytes() == LARGE


def _file_system(path) -> bytes:
    """The type of the file system of a path."""
    with Path("/proc/self/mountinfo").open("rb") as mounts:
        device = path.stat().st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}".encode()
        return b" ".join(line for line in mounts if line.split()[2] == wanted)


def _resident(path) -> int:
    """The number of pages of a file in memory (`mincore`)."""
    pages = LARGE_BYTES // mmap.PAGESIZE
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        found = (ctypes.c_ubyte * pages)()
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(LARGE_BYTES), found) == 0
        return sum(one & 1 for one in found)
