"""Cost of isolating the records that a transform cannot process.

Some records of a batch cannot be parsed. The batch is written as a worker writes it. The writer
runs the transform on parts of the batch to find these records. `jvm` fails in a Spark expression
(`from_json` with FAILFAST), `python` in a Python UDF, and `arrow` in an Arrow function without
Spark. `values` returns text that is not UTF-8, which no table can hold.

    python -m benchmarks.isolation [--records 50000] [--bad 30]
        [--transform jvm python values arrow] [--json]

Each transform runs in a separate process on two cores (`local[2]`). Its new session and its writer
are warmed up as a worker does it before its first batch. The table has seconds, processor seconds
of all its processes, Spark jobs, log lines, and leftover files; with `--json` the last line has
them by transform. Files of the batch itself are not counted. The benchmark takes a minute on two
idle cores.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil
import pyarrow as pa

from kcl_pipeline.batch import (
    RECORD_SCHEMA,
    Batch,
    BatchWriter,
    Chunk,
    payload_bytes,
)
from kcl_pipeline.config import BatchSettings
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.worker.batch_runner import WriteSteps
from kcl_pipeline.worker.failures import FailureLimits

TRANSFORMS: Final = ("jvm", "python", "values", "arrow")
_COLUMNS: Final = ("records", "found", "seconds", "cpu_seconds", "jobs", "log_lines", "files")
_GOOD: Final = b'{"id": "%d", "amount": 1.5}'
_BAD: Final = b'{"id": "%d", "amou'


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one run; `found` and `expected` are row numbers."""

    transform: str
    records: int
    expected: frozenset[int]
    found: frozenset[int]
    jobs: int
    files: int
    seconds: float
    cpu_seconds: float


def isolate(session: Any, *, records: int, bad: int, transform: str, seed: int) -> Result:
    """Write one batch with `bad` records that fail, chosen at random."""
    chosen = frozenset(random.Random(seed).sample(range(records), bad))
    table = _records(records, chosen)
    chunk = Chunk("shard-0", table, TRIM_HORIZON, Position(str(records)), payload_bytes(table))
    batch = Batch("b", (chunk,), table)
    with tempfile.TemporaryDirectory() as folder:
        splitter = WriteSteps(
            _writer(session, transform, folder),
            FailureLimits(BatchSettings()),
            lambda same: same,
            random.Random(seed + 1),
            lambda: False,
        )
        paused: dict[str, str] = {}
        jobs, cpu, began = _jobs(session), _cpu_seconds(), time.monotonic()
        [part] = splitter.run(batch, paused.update)
        seconds, cpu = time.monotonic() - began, _cpu_seconds() - cpu
        numbers = part.failed["shard-0"]["sequence_number"].to_pylist()
        files = sum(path.is_file() for path in Path(folder).rglob("*")) - len(part.written_files)
        found = frozenset(int(number) - 1 for number in numbers)
        jobs = _jobs(session) - jobs
    return Result(transform, records, chosen, found, jobs, files, seconds, cpu)


def _records(count: int, bad: frozenset[int]) -> pa.Table:
    data = [(_BAD if row in bad else _GOOD) % row for row in range(count)]
    now = pa.scalar(datetime(2026, 1, 1, tzinfo=UTC), pa.timestamp("us", tz="UTC"))
    columns = {
        "stream": ["orders"] * count,
        "shard_id": ["shard-0"] * count,
        "sequence_number": [str(row + 1) for row in range(count)],
        "sub_sequence_number": [0] * count,
        "partition_key": ["key"] * count,
        "explicit_hash_key": pa.nulls(count, pa.string()),
        "data": data,
        "approximate_arrival_timestamp": pa.repeat(now, count),
        "encryption_type": pa.nulls(count, pa.string()),
    }
    return pa.table(columns, schema=RECORD_SCHEMA)


def _writer(session: Any, transform: str, folder: str) -> BatchWriter:
    if transform == "arrow":
        return ArrowBatchWriter(_parse, folder)
    from pyspark.sql import functions as f  # noqa: PLC0415 (not for Arrow)

    from kcl_pipeline.spark.writer import SparkBatchWriter  # noqa: PLC0415 (likewise)

    def in_jvm(frame: Any) -> Any:
        text, columns = f.col("data").cast("string"), "id string, amount double"
        order = f.from_json(text, columns, {"mode": "FAILFAST"}).alias("order")
        return frame.select(order).select("order.*")

    def in_python(frame: Any) -> Any:
        amount = f.udf(lambda data: float(json.loads(data)["amount"]), "double")
        return frame.select(amount("data").alias("amount"))

    def to_values(frame: Any) -> Any:
        is_whole = f.col("data").cast("string").endswith("}")
        return frame.select(f.when(~is_whole, f.expr("cast(x'ff' as string)")).alias("text"))

    chosen = {"jvm": in_jvm, "python": in_python, "values": to_values}
    writer = SparkBatchWriter(session, chosen[transform], folder)
    writer.prepare()
    return writer


def _parse(table: pa.Table) -> pa.Table:
    return pa.table({"amount": [json.loads(data)["amount"] for data in table["data"].to_pylist()]})


def _jobs(session: Any) -> int:
    """Return how many jobs the session has started so far."""
    if session is None:
        return 0
    return int(session.sparkContext._jsc.sc().dagScheduler().nextJobId())  # noqa: SLF001


def _cpu_seconds() -> float:
    """Return the processor seconds of this process and its descendants, including ended ones."""
    total = 0.0
    for process in (me := psutil.Process(), *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _run_one(transform: str, records: int, bad: int) -> None:
    session = None
    if transform != "arrow":
        from kcl_pipeline.spark.session import build_session, warm_up  # noqa: PLC0415 (likewise)

        session = build_session("isolation", {"spark.master": "local[2]"})
        warm_up(session)
    result = isolate(session, records=records, bad=bad, transform=transform, seed=7)
    print(json.dumps(asdict(result) | {"expected": None, "found": len(result.found)}))
    if result.found != result.expected:
        raise SystemExit("other records were found than fail")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run each transform in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--bad", type=int, default=30)
    parser.add_argument("--transform", nargs="+", choices=TRANSFORMS, default=list(TRANSFORMS))
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        _run_one(options.transform[0], options.records, options.bad)
        return
    results = {}
    print("".join(name.rjust(13) for name in ("transform", *_COLUMNS)))
    for transform in options.transform:
        command = [sys.executable, "-m", "benchmarks.isolation", "--inside"]
        command += ["--transform", transform]
        command += ["--records", str(options.records), "--bad", str(options.bad)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        result["log_lines"] = len(done.stderr.splitlines())
        results[transform] = {name: round(result[name], 1) for name in _COLUMNS}
        print("".join(str(one).rjust(13) for one in (transform, *results[transform].values())))
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
