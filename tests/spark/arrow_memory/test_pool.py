"""Memory files are used again within the budget, and never while somebody uses their bytes."""

from __future__ import annotations

import gc
import os

import pyarrow as pa
import pytest

from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.spark.arrow_memory import pool
from kcl_pipeline.spark.arrow_memory.pool import HEADER_BYTES, MemoryFile, MemoryPool
from tests.support.result_files import kept_bytes
from tests.support.spark_batches import open_files


def filled(file: MemoryFile, byte: bytes) -> None:
    with file.target() as target:
        target.write(byte * file.size)


def test_a_file_is_used_again_with_its_pages() -> None:
    files = MemoryPool(MemoryBudget(10**6))
    (first,) = files.take("records", [10_000])
    filled(first, b"a")
    files.give_back([first], is_ended=True)
    assert kept_bytes(files) == 10_000
    assert files.take("result", [64]) != [first], "of another kind"
    (second,) = files.take("records", [5_000])
    assert second is first
    assert second.size == 10_000, "a file never becomes smaller"
    files.give_back([second], is_ended=True)
    (third,) = files.take("records", [20_000])
    assert third is first
    filled(third, b"c")
    assert third.buffer(20_000).to_pybytes() == b"c" * 20_000


def test_bytes_that_somebody_keeps_do_not_change() -> None:
    files = MemoryPool(MemoryBudget(10**6))
    (first,) = files.take("result", [1_000])
    filled(first, b"a")
    kept = pa.Array.from_buffers(pa.uint8(), 1_000, [None, first.buffer(1_000)]).slice(10)
    files.give_back([first], is_ended=True)
    (second,) = files.take("result", [1_000])
    filled(second, b"b")
    del first
    gc.collect()
    assert set(kept.to_pylist()) == {ord("a")}
    del kept
    files.give_back([second], is_ended=True)
    assert files.take("result", [1_000]) == [second]


def test_a_file_that_a_task_may_use_is_not_used_again() -> None:
    files = MemoryPool(MemoryBudget(10**6))
    given = files.take("records", [1_000, 1_000])
    files.give_back(given, is_ended=False)
    assert kept_bytes(files) == 0
    assert not set(given) & set(files.take("records", [1_000, 1_000]))


def test_files_have_one_budget() -> None:
    before = open_files()
    memory = MemoryBudget(10_000)
    files = MemoryPool(memory)
    records = files.take("records", [4_000, 2_000])
    assert memory._room() == 4_000
    result = files.take("result", [HEADER_BYTES])
    with files.growing() as room:
        assert room == 4_000 - HEADER_BYTES
        assert memory._room() == 0, "a result counts from its beginning"
        result[0].grow(3_000)
    assert memory._room() == 1_000
    files.give_back(result, is_ended=True)
    assert memory._room() == 1_000, "what is kept counts"
    files.give_back(records, is_ended=True)
    large = files.take("records", [8_000])
    assert memory._room() <= 2_000
    assert kept_bytes(files) <= 2_000, "files that nobody uses are freed first"
    larger = files.take("records", [20_000])
    assert memory._room() == 0
    files.give_back([*large, *larger], is_ended=True)
    assert kept_bytes(files) <= 10_000
    assert memory.counts()["files"] == kept_bytes(files)
    del records, result, large, larger, files
    assert open_files() == before


def test_kept_files_are_freed_for_records_that_are_read() -> None:
    memory = MemoryBudget(10_000)
    files = MemoryPool(memory)
    (used,) = files.take("records", [3_000])
    kept = files.take("records", [2_000, 4_000])
    files.give_back(kept, is_ended=True)
    assert memory.has_room(1_000)
    assert kept_bytes(files) == 6_000, "there was room"
    assert memory.has_room(4_000)
    assert kept_bytes(files) == 2_000
    assert memory.has_room(7_000)
    assert kept_bytes(files) == 0
    assert not memory.has_room(7_001), "a file in use stays"
    assert (memory.used_bytes, used.size) == (3_000, 3_000)


def test_a_reader_does_not_wait_for_a_batch_that_gets_its_memory() -> None:
    memory = MemoryBudget(10_000)
    files = MemoryPool(memory)
    files.give_back(files.take("records", [8_000]), is_ended=True)
    with files._lock:  # such as while the kernel provides the pages of a batch
        assert not memory.has_room(5_000)
    assert memory.has_room(5_000)


def test_no_memory_is_an_error_and_not_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    memory = MemoryBudget(1_000)
    files = MemoryPool(memory)
    monkeypatch.setattr(pool.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        files.take("records", [1_000])
    assert memory._room() == 1_000
