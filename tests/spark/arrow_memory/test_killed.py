"""kill -9 of Python or of the JVM while tasks run: no process keeps memory files of the batch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.resources import memory_file_bytes
from kcl_pipeline.batch import Batch
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.spark.writer import SparkBatchWriter
from tests.support.spark_batches import records

pytestmark = pytest.mark.spark

DEADLINE_SECONDS = 60
WORKER = """
import json, os, signal, sys, threading, time
from pathlib import Path
from benchmarks.resources import memory_file_bytes
from kcl_pipeline.batch import Batch
from kcl_pipeline.errors import SinkError
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.spark.session import build_session
from kcl_pipeline.spark.writer import SparkBatchWriter
from tests.support.spark_batches import records

victim, folder = sys.argv[1], Path(sys.argv[2])
session = build_session("killed", {"spark.master": "local[2]"})
jvm = session.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
started = str(folder / "started")

def slow(parts):
    for part in parts:
        yield part  # its rows are in the memory of the result
    open(started, "w").close()
    time.sleep(600)

memory = MemoryBudget(2**29)
first = SparkBatchWriter(session, None, str(folder / "t"), memory=memory)
first.write(Batch("kept", (), records(*[b"x" * 100_000] * 100)))
writer = SparkBatchWriter(
    session, lambda f: f.mapInArrow(slow, f.schema), str(folder / "t"), memory=memory
)
writer.prepare()

def kill():
    while not os.path.exists(started):
        time.sleep(0.01)
    held = memory_file_bytes([os.getpid(), jvm])
    print(json.dumps({"jvm": jvm, "held": held, "counts": memory.counts()}), flush=True)
    os.kill(os.getpid() if victim == "python" else jvm, signal.SIGKILL)

threading.Thread(target=kill).start()
try:
    writer.write(Batch("b", (), records(*[b"y" * 100_000] * 100)))
except SinkError:
    pass
counts = memory.counts()
del first, writer
print(json.dumps({"held": memory_file_bytes([os.getpid()]), "counts": counts}), flush=True)
os._exit(0)
"""


def test_what_tasks_hold_is_in_files_that_end_with_their_processes(spark, tmp_path: Path) -> None:
    """They have no name, so the kernel frees them after any kill. The long form kills."""
    started, goes_on = tmp_path / "started", tmp_path / "goes_on"
    pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    before, held, named = memory_file_bytes(pids), [], []

    def waiting(parts):
        yield from parts
        started.touch()
        while not goes_on.exists():
            time.sleep(0.01)

    def look() -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        held.append(memory_file_bytes(pids) - before)
        named.extend(path for path in (tmp_path / "t").rglob("*") if path.is_file())
        goes_on.touch()

    writer = SparkBatchWriter(
        spark,
        lambda frame: frame.mapInArrow(waiting, frame.schema),
        str(tmp_path / "t"),
        memory=MemoryBudget(2**29),
    )
    thread = threading.Thread(target=look)
    thread.start()
    written = writer.write(Batch("b", (), records(*[b"y" * 100_000] * 100)))
    thread.join()
    assert held[0] > 10**7, "the batch"
    assert named == []
    assert written.output_rows == 100


@pytest.mark.long  # each starts a session
@pytest.mark.parametrize("victim", ["python", "jvm"])
def test_a_process_killed_while_tasks_run_leaves_no_memory(victim: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, victim, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    output, _ = process.communicate(timeout=3 * DEADLINE_SECONDS)
    told = [json.loads(line) for line in output.splitlines()]
    assert told[0]["held"] > 2 * 10 * 10**6, "kept files, and the batch"
    assert told[0]["counts"]["files"] > 10**7
    assert told[0]["counts"]["result"] > 0, "the job runs"
    if victim == "python":
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 0
        assert told[1]["held"] == 0, "the files are closed with the writers, without a JVM"
        assert told[1]["counts"]["result"] == 0
    deadline = time.monotonic() + DEADLINE_SECONDS
    while psutil.pid_exists(told[0]["jvm"]) and memory_file_bytes([told[0]["jvm"]]):
        assert time.monotonic() < deadline, "the JVM still has the batch"
        time.sleep(0.1)
