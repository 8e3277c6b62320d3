"""A writer process of the tests with many writers.

It has its own module because spawned processes import it.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from kcl_pipeline.batch import Batch
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.position import NOTHING_STORED
from tests.support.delta_tables import Committer, entry

SCHEMA = pa.schema([("id", pa.int64())])
SHARED = "contested"
NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


def write_batches(
    uri: str, worker: int, commits: int, options: Mapping[str, str]
) -> dict[str, Any]:
    """Commit `commits` batches of two private leases, and as often try a lease that every writer
    wants; ids tell who wrote what.
    """
    sink = Committer(DeltaSink(uri, storage_options=options), "app")
    rng = random.Random(worker)
    writer = ArrowBatchWriter(None, uri, storage_options=options)
    sink.ensure(SCHEMA)
    stored = dict.fromkeys((f"{worker}-x", f"{worker}-y"), NOTHING_STORED)
    written, won = [], 0
    for turn in range(1, commits + 1):
        ident = worker * 1000 + turn
        batch = writer.write(
            Batch(f"w{worker}-{turn}", (), pa.table({"id": pa.array([ident], pa.int64())}))
        )
        entries = [entry(key, turn, seen) for key, seen in stored.items()]
        outcome = sink.land(batch, entries)
        if outcome.version is None:
            raise AssertionError(
                f"writer {worker} was refused {outcome.refused} on leases of its own"
            )
        written.append(ident)
        stored = {one.key: one.becomes for one in entries}
        contested = sink.stored(SHARED)
        rival = writer.write(
            Batch(f"s{worker}-{turn}", (), pa.table({"id": pa.array([-ident], pa.int64())}))
        )
        if rng.random() < 0.5:
            outcome = sink.land(rival, [entry(SHARED, ident, contested)])
            if outcome.version is not None:
                written.append(-ident)
                won += 1
        else:
            won += sink.move(SHARED, ident, contested)
    return {"written": written, "won": won}


def run_writers(
    uri: str, workers: int, commits: int, options: Mapping[str, str] = NO_OPTIONS
) -> Sequence[dict[str, Any]]:
    """Run the writers in processes of their own, all at once."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers) as pool:
        return pool.starmap(
            write_batches,
            [(uri, worker, commits, dict(options)) for worker in range(1, workers + 1)],
            chunksize=1,
        )


def create_tables(root: str, rounds: int, barrier: Any) -> None:
    """Make the same tables as everybody else, each at the same moment as everybody else."""
    for turn in range(rounds):
        sink = DeltaCommitter(DeltaSink(f"{root}/{turn}"), "app")
        barrier.wait(60)
        sink.ensure(SCHEMA)


def run_creators(root: str, workers: int, rounds: int) -> list[int | None]:
    """Run `create_tables` in processes of their own; their exit codes."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(workers)
    processes = [
        context.Process(target=create_tables, args=(root, rounds, barrier)) for _ in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]
