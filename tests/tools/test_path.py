"""The path of a batch: which modules are entered, on which threads, and what carries the batch."""

from __future__ import annotations

import threading

from kcl_pipeline.batch import NO_RECORDS, Batch, Chunk
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.worker.failures import without
from kcl_pipeline.worker.sources import joined
from tools.path import Recorder, kind_of, result, text


def recorded(call, thread):
    recorder = Recorder()
    threading.setprofile(recorder.note)
    try:
        recorder.is_open = True
        running = threading.Thread(target=call, name=thread)
        running.start()
        running.join()
    finally:
        threading.setprofile(None)
    return result(recorder.modules, recorder.classes())


def split_a_batch():
    part = Chunk("shard-0", NO_RECORDS, TRIM_HORIZON, Position("1"), 0)
    return without(Batch("b-1", (part,), NO_RECORDS), ["shard-0"])


def test_a_value_that_has_the_records_carries_the_batch():
    found = recorded(split_a_batch, "processing")
    assert found["threads"]["processing"] == ["batch", "position", "worker/failures"]
    assert found["worker_and_leases_when_processing"] == 1
    assert "kcl_pipeline.batch.Batch" in found["classes"]
    assert "kcl_pipeline.position.Position" not in found["classes"]


def test_the_threads_of_the_leader_do_not_count():
    found = recorded(lambda: joined("b-1", [], {}), "leader-sync")
    assert found["threads"] == {"leader-sync": ["worker/sources"]}
    assert found["modules"] == 0
    assert "0 modules without the leader" in text(found)


def test_threads_of_one_kind_are_counted_together():
    kinds = {kind_of(name) for name in ("fetch-0", "fetch-11", "Thread-7 (run)", "leader-call")}
    assert kinds == {"fetch", "Thread", "leader-call"}
