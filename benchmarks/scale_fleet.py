"""An application of any size in memory: streams, tables with capacity units, and two workers.

One worker leads. Another one stands for all others. Between two cycles the leases of the others are
renewed without requests, as other processes would.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from benchmarks.capacity import Meter, MeteredStore
from kcl_pipeline.batch import NO_RECORDS, RECORD_SCHEMA
from kcl_pipeline.config import ConsumerSettings, RetrievalSettings
from kcl_pipeline.events import CycleFailed, Event
from kcl_pipeline.kinesis.client import IteratorType, LatestIterator, RecordsPage, ShardFilterType
from kcl_pipeline.leader.assign import CycleReport
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.leases.coordinator import LOCK_VERSION, CoordinatorStateTable
from kcl_pipeline.leases.row import COUNTER, LEADER_KEY, LEASE_KEY, OWNER, Lease, lease_to_item
from kcl_pipeline.leases.store import Item
from kcl_pipeline.leases.workers import WorkerMetrics, WorkerMetricsTable
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.position import Position
from kcl_pipeline.shards import MAX_HASH_KEY, HashKeyRange, Shard, StreamId
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.sink import InMemorySink, MemoryBatchWriter, MemoryTable
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.worker import Worker

SHARDS_PER_STREAM = 100
_ARRIVED = datetime(2023, 11, 14, tzinfo=UTC)
LEADER = "w00000"
SAMPLE = "w00001"
_SEQUENCE_NUMBER = "49590338271490256608559692538361571095921575989136588898"


class ProcessClock(VirtualClock):
    """Virtual time plus the processor time of this process, so that other load does not count."""

    def monotonic(self) -> float:
        return super().monotonic() + time.process_time()

    def wall(self) -> float:
        return super().wall() + time.process_time()


class IdleKinesis:
    """Streams of `SHARDS_PER_STREAM` shards that receive no records."""

    def __init__(self, leases: int) -> None:
        count = min(leases, SHARDS_PER_STREAM)
        step = (MAX_HASH_KEY + 1) // count
        ends = [*(step * (number + 1) - 1 for number in range(count - 1)), MAX_HASH_KEY]
        self.shards = tuple(
            Shard(f"shardId-{number:012}", HashKeyRange(step * number, end), _SEQUENCE_NUMBER)
            for number, end in enumerate(ends)
        )
        self.streams = tuple(f"stream-{number:05}" for number in range(leases // count))

    def resolve_stream(self, name_or_arn: str, *, multi_stream: bool) -> StreamId:
        """See `KinesisClient`."""
        name = name_or_arn.rpartition("/")[2]
        arn = f"arn:aws:kinesis:eu-west-1:123456789012:stream/{name}"
        account, epoch = ("123456789012", 1_690_000_000) if multi_stream else (None, None)
        return StreamId(name, account, epoch, arn, created_millis=1_690_000_000_000)

    def list_shards(
        self,
        stream: StreamId,
        shard_filter: ShardFilterType | None = None,
        timestamp: datetime | None = None,
    ) -> tuple[Shard, ...]:
        """See `KinesisClient`."""
        return self.shards

    def service_time(self, stream: StreamId) -> datetime | None:
        """See `KinesisClient`. Unknown."""
        return None

    def get_shard_iterator(
        self,
        stream: StreamId,
        shard_id: str,
        iterator_type: IteratorType,
        *,
        sequence_number: str | None = None,
        timestamp: datetime | None = None,
    ) -> str:
        """See `KinesisClient`. The iterator has the length of a real one."""
        return f"{stream.name}/{shard_id}/".ljust(220, "A")

    def latest_iterator(self, stream: StreamId, shard_id: str) -> LatestIterator:
        """See `KinesisClient`."""
        return LatestIterator(self.get_shard_iterator(stream, shard_id, "LATEST"), None)

    def get_records(
        self, stream: StreamId, shard_id: str, iterator: str, limit: int
    ) -> RecordsPage:
        """See `KinesisClient`."""
        return RecordsPage(NO_RECORDS, iterator, 0)


class BusyKinesis(IdleKinesis):
    """Streams in which every read returns one new record."""

    def __init__(self, leases: int) -> None:
        super().__init__(leases)
        self._last = int(_SEQUENCE_NUMBER)

    def get_records(
        self, stream: StreamId, shard_id: str, iterator: str, limit: int
    ) -> RecordsPage:
        """See `KinesisClient`."""
        self._last += 1
        row = {
            "stream": stream.name,
            "shard_id": shard_id,
            "sequence_number": str(self._last),
            "sub_sequence_number": 0,
            "partition_key": "key",
            "data": b"x",
            "approximate_arrival_timestamp": _ARRIVED,
        }
        return RecordsPage(pa.Table.from_pylist([row], RECORD_SCHEMA), iterator, 0, bytes=4)


class Fleet:
    """One application with its tables.

    Args:
        leases: Number of leases, a multiple of 100 from 200 on.
        workers: Number of workers.
        begun: Whether the leases exist and are owned. False: the first cycle creates and assigns
            them.
        kinesis: None: idle streams.
        clock: None: virtual time plus processor time.
        settings: Sections of settings that differ from the defaults.
    """

    def __init__(
        self,
        leases: int,
        workers: int,
        *,
        begun: bool = False,
        kinesis: IdleKinesis | None = None,
        clock: VirtualClock | None = None,
        **settings: Any,
    ) -> None:
        self.clock = clock or ProcessClock()
        self.kinesis = kinesis or IdleKinesis(leases)
        self.names = tuple(f"w{number:05}" for number in range(workers))
        self.stopped: frozenset[str] = frozenset()
        retrieval: dict[str, Any] = {"fetch_on": "driver", "retrieval_mode": "polling"}
        retrieval |= settings.pop("retrieval", {})
        self.settings = ConsumerSettings(
            application_name="scale",
            streams=self.kinesis.streams,
            retrieval=RetrievalSettings(**retrieval),
            **settings,
        )
        self.lease_store = MeteredStore("leases", LEASE_KEY, self.clock, is_indexed=True)
        self.worker_store = MeteredStore("workers", "wid", self.clock)
        self.coordinator_store = MeteredStore("coordinator", "key", self.clock)
        self.lease_table = LeaseTable(self.lease_store)
        self.worker_table = WorkerMetricsTable(self.worker_store)
        self.coordinator_table = CoordinatorStateTable(self.coordinator_store)
        self.events: list[Event] = []
        self.counted = self.meter()
        for name in self.names:
            self.worker_table.report(self._worker_row(name))
        if begun:
            for number, item in enumerate(self._begun_leases()):
                item[OWNER] = {"S": self.names[number % workers]}
                self.lease_store.plant(item)

    def _worker_row(self, name: str) -> WorkerMetrics:
        return WorkerMetrics(
            name,
            int(self.clock.wall()),
            stats={"C": (20.0,) * 10},
            operating_range={"C": (90,)},
            run_id=f"{name}-run",
        )

    def _begun_leases(self) -> Iterable[Item]:
        is_multi_stream = self.settings.is_multi_stream
        for name in self.kinesis.streams:
            stream = self.kinesis.resolve_stream(name, multi_stream=is_multi_stream)
            for shard in self.kinesis.shards:
                lease = Lease(
                    stream.lease_key(shard.shard_id),
                    Position(_SEQUENCE_NUMBER),
                    counter=1_000,
                    hash_key_range=shard.hash_key_range,
                    throughput_kbps=100.0,
                    stream=stream.serialized if is_multi_stream else None,
                )
                yield lease_to_item(lease)

    def meter(self) -> Meter:
        """Return a new meter that counts the requests from now on."""
        self.counted = Meter()
        for store in (self.lease_store, self.worker_store, self.coordinator_store):
            store.meter = self.counted
        return self.counted

    def leader(self, name: str) -> LeaderCycle:
        """Return a leader."""
        return LeaderCycle(
            self.settings,
            self.lease_table,
            self.worker_table,
            self.coordinator_table,
            self.kinesis,
            self.clock,
            self.events.append,
            name,
            rng=random.Random(name),
        )

    def worker(self, name: str, *, leads: bool = False) -> Worker:
        """Return a worker without threads."""
        table = MemoryTable()
        return Worker(
            WorkerDependencies(
                worker_id=name,
                settings=self.settings,
                lease_table=self.lease_table,
                worker_table=self.worker_table,
                coordinator_table=self.coordinator_table,
                kinesis=self.kinesis,
                writer=MemoryBatchWriter(table),
                sink=InMemorySink(table, clock=self.clock),
                clock=self.clock,
                rng=random.Random(name),
                events=self.events.append,
                leader=self.leader(name) if leads else None,
                run_id=f"{name}-run",
                parallel=False,
            ),
        )

    def cycle(self, leader: LeaderCycle) -> CycleReport:
        """Let the other workers renew and report, and run one cycle.

        Raises:
            RuntimeError: The cycle had an error, or did not lead.
        """
        self.renew_others()
        report = leader.run_once()
        if not report.led or report.error is not None:
            raise RuntimeError(f"the cycle failed: {report}"[:2_000])
        return report

    def renew_others(self, besides: Iterable[str] = ()) -> None:
        """Renew the leases of running workers, and update their rows, without requests."""
        silent = {*besides, *self.stopped, None}
        now = str(int(self.clock.wall()))

        def renewed(item: Item) -> Item:
            owner = item.get("checkpointOwner", item.get(OWNER, {})).get("S")
            if owner in silent:
                return {}
            return {COUNTER: {"N": str(int(item[COUNTER]["N"]) + 1)}}

        self.lease_store.replace_all(renewed)
        self.worker_store.replace_all(
            lambda item: {} if item["wid"]["S"] in silent else {"lut": {"N": now}}
        )

    def renew_lock(self) -> None:
        """Renew the lock of the leader without requests, as its process would."""
        version = {"S": str(self.clock.monotonic())}
        self.coordinator_store.replace_all(
            lambda item: {LOCK_VERSION: version} if item["key"]["S"] == LEADER_KEY else {}
        )

    def owned_by_stopped(self) -> bool:
        """Return whether a lease belongs to a stopped worker."""
        return any(self.lease_store.has_owned(name) for name in self.stopped)

    def require_no_failure(self) -> None:
        """Raise `RuntimeError` if a cycle has failed."""
        failed = next((event for event in self.events if isinstance(event, CycleFailed)), None)
        if failed is not None:
            raise RuntimeError(f"a cycle failed: {failed}"[:2_000])
