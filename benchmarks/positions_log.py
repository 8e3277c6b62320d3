"""Size of a Delta log that stores the positions of shards, and the cost of opening it.

    python -m benchmarks.positions_log [--shards 10000] [--json]

Batches of 64 shards are committed with their positions until every shard has one, and then a
hundred more. New processes open the table and read the positions of 64 shards.

- `kb_per_commit`: bytes of the log per commit of 64 shards, without log checkpoints.
- `mb_per_day`: of one worker with 64 shards that commits `commits_per_s` times per second, the rate
  of a worker that polls with default settings.
- `checkpoint_kb`: the last log checkpoint, which has the positions of all shards.
- `open_ms`, `open_mb`: median time and memory of a new process that opens the table and reads 64
  positions; `first_open_ms` and `first_open_mb` are those of a table with 64 shards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil
import pyarrow as pa

from kcl_pipeline.batch import Batch
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.position import NOTHING_STORED, Position, StoredPosition

SCHEMA: Final = pa.schema([("id", pa.int64()), ("data", pa.binary())])
BATCH_SHARDS: Final = 64
COMMITS: Final = 100
OPENINGS: Final = 5
COMMITS_PER_S: Final = 1.9
"""Of a worker that polls with default settings (`benchmarks.microbatch`)."""
STREAM: Final = "arn:aws:kinesis:us-east-1:111122223333:stream/orders/1760000000"


def keys_of(shards: int) -> list[str]:
    """Return keys as a worker has them (`sinks.sink.shard_key`)."""
    return [f"{STREAM}/shardId-{number:012d}" for number in range(shards)]


class Table:
    """One Delta table, to which batches of shards are committed."""

    def __init__(self, uri: str) -> None:
        self.log = Path(uri) / "_delta_log"
        self._sink = DeltaCommitter(DeltaSink(uri), "orders")
        self._sink.ensure(SCHEMA)
        self._table_id = self._sink.positions([]).table_id
        self._writer = ArrowBatchWriter(None, uri)
        self._rows = pa.table(
            {"id": pa.array(range(64), pa.int64()), "data": pa.array([bytes(100)] * 64)},
            schema=SCHEMA,
        )
        self._stored: dict[str, StoredPosition] = {}
        self._turn = 0

    def commit(self, keys: Sequence[str]) -> int:
        """Commit one batch of these shards and return the bytes of its log entry.

        Raises:
            AssertionError: The commit was refused.
        """
        self._turn += 1
        written = self._writer.write(Batch(f"b-{self._turn}", (), self._rows))
        end = Position(str(49 * 10**54 + self._turn))
        expected = {key: self._stored.get(key, NOTHING_STORED) for key in keys}
        becomes = {key: stored.moved(end) for key, stored in expected.items()}
        outcome = self._sink.commit(
            self._table_id, written.written_files, expected, becomes, written.output_schema
        )
        if outcome.version is None:
            raise AssertionError(f"refused: {outcome.refused}")
        self._stored |= becomes
        return (self.log / f"{outcome.version:020d}.json").stat().st_size


def opening(uri: str, shards: int) -> tuple[float, float]:
    """Open the table in a new process: median milliseconds and MB for 64 positions."""
    command = [sys.executable, "-m", "benchmarks.positions_log", "--open", uri]
    samples = [
        json.loads(subprocess.check_output([*command, "--shards", str(shards)], text=True))
        for _ in range(OPENINGS)
    ]
    return (
        round(statistics.median(one["ms"] for one in samples), 1),
        round(statistics.median(one["mb"] for one in samples), 1),
    )


def open_once(uri: str, shards: int) -> dict[str, float]:
    """Open the table in this process, which has imported everything before."""
    before, began = _resident_mb(), time.perf_counter()
    found = DeltaCommitter(DeltaSink(uri), "orders").positions(keys_of(shards)[-BATCH_SHARDS:])
    millis = (time.perf_counter() - began) * 1000
    if not all(one.position for one in found.shards.values()):
        raise AssertionError("a position is missing")
    return {"ms": millis, "mb": _resident_mb() - before}


def _resident_mb() -> float:
    return psutil.Process().memory_info().rss / 2**20


def run(folder: str, shards: int) -> dict[str, Any]:
    """Measure everything."""
    keys = keys_of(shards)
    small = Table(f"{folder}/small")
    small.commit(keys[:BATCH_SHARDS])
    large = Table(f"{folder}/large")
    for first in range(0, shards, BATCH_SHARDS):
        large.commit(keys[first : first + BATCH_SHARDS])
    entries = [large.commit(keys[-BATCH_SHARDS:]) for _ in range(COMMITS)]
    checkpoints = sorted(large.log.glob("*.checkpoint*.parquet"))
    first_open, opened = (
        opening(f"{folder}/small", BATCH_SHARDS),
        opening(f"{folder}/large", shards),
    )
    kb = statistics.mean(entries) / 1024
    return {
        "shards": shards,
        "kb_per_commit": round(kb, 1),
        "commits_per_s": COMMITS_PER_S,
        "mb_per_day": round(kb * COMMITS_PER_S * 86_400 / 1024),
        "checkpoint_kb": round(checkpoints[-1].stat().st_size / 1024) if checkpoints else None,
        "first_open_ms": first_open[0],
        "first_open_mb": first_open[1],
        "open_ms": opened[0],
        "open_mb": opened[1],
    }


def main() -> None:
    """Print the result as lines, or as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--open", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.open:
        print(json.dumps(open_once(given.open, given.shards)))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = run(folder, given.shards)
    print(json.dumps(found) if given.json else "\n".join(f"{k}: {v}" for k, v in found.items()))


if __name__ == "__main__":
    main()
