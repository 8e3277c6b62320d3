"""Lines of the mutation ledger that no other test would miss."""

import random
from types import SimpleNamespace

import pyarrow as pa
import pytest

from kcl_pipeline.batch import RECORD_SCHEMA, Chunk
from kcl_pipeline.config import ConsumerSettings, LeaseSettings, RetrievalSettings
from kcl_pipeline.kinesis.prefetch import Prefetcher
from kcl_pipeline.leader.liveness import Liveness
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import NOTHING_STORED, TRIM_HORIZON, Position, StoredPosition
from kcl_pipeline.shards import ChildShard, HashKeyRange, StreamId
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.sink import LogEntry, MemoryTable
from kcl_pipeline.testing.tables import InMemoryLeaseTable, create_lease
from kcl_pipeline.worker.batch_runner import BatchRunner
from kcl_pipeline.worker.consumer import ConsumerState, ShardConsumer

MIB = 1_048_576
KEY = "shardId-000000000000"


@pytest.fixture
def world():
    clock, table, events = VirtualClock(), InMemoryLeaseTable(), []
    create_lease(table, Lease(KEY, TRIM_HORIZON, owner="w1"))
    return SimpleNamespace(
        clock=clock,
        table=table,
        events=events,
        leases=HeldLeases(table, "w1", LeaseSettings(), clock, events.append),
    )


def test_a_lease_whose_owner_somebody_removed_by_hand_is_not_held_on(world):
    world.leases.discover()
    assert [h.lease.lease_key for h in world.leases.held()] == [KEY]
    item = world.table.rows()[KEY]
    del item["leaseOwner"]
    world.table.plant(item)
    world.leases.renew_all()
    assert world.leases.held() == ()


def test_a_lease_is_gained_once_by_two_ways_at_the_same_time(world):
    row = world.table.get(KEY)
    first = world.leases._gain(row, 0.0)
    assert first is not None
    assert world.leases._gain(row, 0.0) is None
    assert world.leases.held() == (first,)


def test_a_log_takes_one_entry_per_version():
    table = MemoryTable()
    assert table.append(LogEntry(0))
    assert not table.append(LogEntry(0, positions={"a/b": StoredPosition(1)}))
    assert not table.append(LogEntry(2, positions={"a/b": StoredPosition(1)}))
    assert table.stored("b") == NOTHING_STORED


class Reader:
    """Brings a mebibyte each time, and during a fetch lets another thread look for work."""

    millis_behind_latest = 1_000
    ended = False
    last_bytes = MIB
    read_up_to_millis = None

    def __init__(self, lease_key, during=lambda: None):
        self.lease_key = lease_key
        self.during = during
        self.reads = 0

    def read(self):
        self.reads += 1
        self.during()
        numbers = [Position(str(self.reads)), Position(str(self.reads + 1))]
        return Chunk(
            self.lease_key, RECORD_SCHEMA.empty_table(), numbers[0], numbers[1], MIB, 1_000, None
        )


def test_what_fetches_under_way_will_bring_counts_against_the_buffer():
    clock = VirtualClock()
    settings = RetrievalSettings(prefetch_max_bytes=MIB)
    prefetcher = Prefetcher(settings, clock, random.Random(1), lambda _event: None)
    readers = [Reader("a"), Reader("b")]
    for reader in readers:
        prefetcher.add(reader)
    for _ in range(20):
        clock.advance(1)
        prefetcher.step()
        prefetcher.take(10, MIB)
    assert all(reader.reads for reader in readers)
    before = sum(reader.reads for reader in readers)
    seen = []
    for reader in readers:
        reader.during = lambda: (
            None if seen else seen.append("asked") or seen.append(prefetcher.step())
        )
    clock.advance(1)
    prefetcher.step()
    assert sum(reader.reads for reader in readers) == before + 1
    assert seen[1] > 0


def test_a_pause_in_a_scan_is_not_taken_for_the_silence_of_workers():
    liveness = Liveness(ConsumerSettings(application_name="orders", streams=("s",)))
    lease = Lease(KEY, TRIM_HORIZON, counter=1, owner="w1")
    liveness.observe([lease], [], scan_started=0.0, scan_finished=1_000.0)
    assert liveness.observation(1_001.0).expired == frozenset()
    liveness.observe([lease], [], scan_started=1_001.0, scan_finished=1_001.0)
    assert liveness.observation(1_001.0).expired == frozenset()
    liveness.observe([lease], [], scan_started=2_000.0, scan_finished=2_000.0)
    assert liveness.observation(2_000.0).expired == {KEY}


@pytest.fixture
def consumer():
    held = SimpleNamespace(lease=Lease(KEY, Position("1"), owner="w1"), lease_key=KEY)
    found = ShardConsumer(held, StreamId("s"), state=ConsumerState.READING)
    found.committed, found.checkpointed = Position("5"), Position("1")
    return found


@pytest.mark.parametrize(
    ("through", "state"), [("9", ConsumerState.READING), ("5", ConsumerState.ENDING)]
)
def test_a_shard_ends_when_its_last_record_is_committed_and_not_before(consumer, through, state):
    children = (ChildShard("shardId-000000000001", (KEY,), HashKeyRange(0, 1)),)
    chunk = Chunk(KEY, pa.table({}), Position("4"), Position(through), 0, 0, children)
    BatchRunner._note_ends(
        SimpleNamespace(_lifecycle=SimpleNamespace(consumers={KEY: consumer})),
        SimpleNamespace(read=[chunk]),
    )
    assert consumer.state is state
