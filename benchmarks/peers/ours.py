"""Consumers of this project: a reader without a worker, and whole workers.

`reader` takes Arrow chunks from the prefetcher. The other modes are workers that commit exactly
once into a Delta table. `arrow` has no transform. `driver` has a DataFrame function and uses driver
fetch; `from_json` is the same with a function that parses JSON into four columns. `executors` and
`executors_frame` are `arrow` and `driver` with executor fetch, on a local Spark cluster. The
environment contains the endpoints.

    python -m benchmarks.peers.ours reader|arrow|driver|from_json|executors|executors_frame STREAM
    FOLDER
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable

from pyspark.sql import DataFrame

from benchmarks.peers.from_json import four_columns
from kcl_pipeline.aws import AwsClients, SessionOptions, open_kinesis
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.events import BatchCommitted, Event
from kcl_pipeline.kinesis.prefetch import Prefetcher
from kcl_pipeline.kinesis.reader import ShardReader
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.position import TRIM_HORIZON

CLUSTER = "local-cluster[2,1,1024]"
FUNCTIONS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "driver": lambda frame: frame,
    "executors_frame": lambda frame: frame,
    "from_json": four_columns,
}


def read(stream_name: str) -> None:
    """Read all shards with the prefetcher and discard the records.

    The number of fetch threads is that of a worker.
    """
    settings, clock = (
        ConsumerSettings(application_name="bench", streams=(stream_name,)),
        SystemClock(),
    )
    kinesis = open_kinesis(settings, AwsClients(settings, SessionOptions()), clock)
    stream = kinesis.resolve_stream(stream_name, multi_stream=False)
    prefetcher = Prefetcher(
        settings.retrieval, clock, random.Random(0), lambda event: print(event, file=sys.stderr)
    )
    for shard in kinesis.list_shards(stream):
        key = shard.shard_id
        prefetcher.add(
            ShardReader(
                kinesis,
                stream,
                key,
                key,
                TRIM_HORIZON,
                shard.hash_key_range,
                settings.retrieval,
                clock,
            )
        )

    def fetch() -> None:
        while True:
            time.sleep(prefetcher.step())

    for _ in range(settings.retrieval.fetch_threads):
        threading.Thread(target=fetch, daemon=True).start()
    taken, stop = 0, clock.signal()
    while True:
        prefetcher.wait_for_data(stop, 0.2)
        taken += sum(chunk.records.num_rows for chunk in prefetcher.take(10**7, 1 << 30))
        print(taken, flush=True)


def work(way: str, stream_name: str, folder: str) -> None:
    """Run a worker with leases, prepares, files, commits and checkpoints."""
    taken = 0

    def count(event: Event) -> None:
        nonlocal taken
        if isinstance(event, BatchCommitted):
            taken += event.records
            print(taken, flush=True)

    on_cluster = way.startswith("executors")
    pipeline = KinesisPipeline(
        name=f"bench-{way}",
        streams=[stream_name],
        sink=DeltaSink(f"{folder}/table"),
        transform=FUNCTIONS.get(way),
        settings_overrides={"retrieval": {"fetch_on": "executors"}} if on_cluster else {},
        spark_config={"spark.master": CLUSTER} if on_cluster else {},
    )
    pipeline.build_worker("bench-1", events=count).run(threading.Event())


if __name__ == "__main__":
    if sys.argv[1] == "reader":
        read(sys.argv[2])
    else:
        work(*sys.argv[1:4])
