"""Records for the fleet: a steady publisher, probes of each open shard, and KPL aggregates."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from itertools import count
from typing import Any

from botocore.exceptions import ClientError

from kcl_pipeline.clock import Clock
from kcl_pipeline.shards import MAX_HASH_KEY
from tests.support.kpl_encoder import aggregate_of

PERIOD_SECONDS = 0.5
PER_PERIOD = 4


class Traffic:
    """Puts records into streams, and remembers the ids that were acknowledged.

    Args:
        kinesis: Client of the embedded AWS.
        streams: Names of the streams.
        clock: The clock.
        rng: Chooses the shards.
    """

    def __init__(
        self, kinesis: Any, streams: Sequence[str], clock: Clock, rng: random.Random
    ) -> None:
        self._kinesis = kinesis
        self._streams = streams
        self._clock = clock
        self._rng = rng
        self._numbers = count()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self.sent: list[str] = []

    def start(self) -> None:
        """Start the steady publisher."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the steady publisher."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(30)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_SECONDS):
            for stream in self._streams:
                try:
                    self.put(stream, [self._rng.randrange(MAX_HASH_KEY) for _ in range(PER_PERIOD)])
                except ClientError as error:  # a stream that is created again is away
                    if error.response["Error"]["Code"] != "ResourceNotFoundException":
                        raise

    def put(self, stream: str, hash_keys: Sequence[int]) -> list[str]:
        """Put a record per hash key; return the ids that were acknowledged."""
        ids = [f"{stream}-{next(self._numbers)}" for _ in hash_keys]
        answer = self._kinesis.put_records(
            StreamName=stream,
            Records=[
                {
                    "Data": f"{one} ".ljust(100, "x").encode(),
                    "PartitionKey": one,
                    "ExplicitHashKey": str(key),
                }
                for one, key in zip(ids, hash_keys, strict=True)
            ],
        )
        results = answer["Records"]
        done = [one for one, got in zip(ids, results, strict=True) if got.get("SequenceNumber")]
        self.sent += done
        return done

    def open_shards(self, stream: str) -> dict[str, int]:
        """Return the first hash key of each open shard."""
        answer = self._kinesis.list_shards(StreamName=stream, ShardFilter={"Type": "AT_LATEST"})
        return {
            one["ShardId"]: int(one["HashKeyRange"]["StartingHashKey"]) for one in answer["Shards"]
        }

    def probe(self) -> list[str]:
        """Put one record into each open shard."""
        return [
            one
            for stream in self._streams
            for one in self.put(stream, list(self.open_shards(stream).values()))
        ]

    def put_aggregate(self, stream: str, hash_key: int, size: int) -> list[str]:
        """Put one KPL aggregate of `size` records into a shard."""
        ids = [f"{stream}-{next(self._numbers)}" for _ in range(size)]
        self._kinesis.put_record(
            StreamName=stream,
            PartitionKey="a",
            ExplicitHashKey=str(hash_key),
            Data=aggregate_of(
                [(one, str(hash_key), f"{one} ".ljust(100, "x").encode()) for one in ids]
            ),
        )
        self.sent += ids
        return ids
