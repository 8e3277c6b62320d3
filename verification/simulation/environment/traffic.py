"""The producer: publishes records, some as KPL aggregates, and keeps a ledger of them."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from kcl_pipeline.position import Position
from kcl_pipeline.testing.kinesis import data as data_plane
from verification.simulation.environment.streams import Generation, Streams

EVENT_SCHEMA: Final = pa.schema(
    [
        ("id", pa.string()),
        ("key", pa.string()),
        ("number", pa.int64()),
        ("lease_name", pa.string()),
        ("sequence_number", pa.string()),
        ("sub_sequence_number", pa.int64()),
    ]
)
_OWN: Final = pa.struct([EVENT_SCHEMA.field(index) for index in range(4)])
"""The columns that the transform makes. The others are those of the records."""
NO_EVENTS: Final = pa.Table.from_batches([], schema=EVENT_SCHEMA)
"""The table without events. (`empty_table()` would import pandas.)"""
POISON: Final = "poison"
IS_POISON: Final = "a record is poison"
IS_BROKEN: Final = "the transform is broken"
KEYS: Final = 12
_MAGIC: Final = b"\xf3\x89\x9a\xc2"
_MOST_IN_ONE: Final = 6
_SEVEN_BITS: Final = 128


@dataclass(frozen=True, slots=True)
class Published:
    """One acknowledged event: its position in Kinesis, and its time (epoch milliseconds).

    `lease_name` has account, stream, creation and shard (`Generation.lease_name`).
    """

    lease_name: str
    position: Position
    arrival_millis: int
    poison: bool


@dataclass
class Ledger:
    """All published events: `numbers` counts per key; `events` are acknowledged, by id."""

    numbers: Counter[str] = field(default_factory=Counter)
    events: dict[str, Published] = field(default_factory=dict)


Tell = Callable[[str, Published], None]
"""Called with the id of every acknowledged event."""


class Producer:
    """Puts records; the order per key is the order of the calls.

    `aggregates` is the share of puts with several events in one KPL record.
    """

    def __init__(
        self, streams: Streams, ledger: Ledger, rng: random.Random, aggregates: float, tell: Tell
    ) -> None:
        self._streams = streams
        self._ledger = ledger
        self._rng = rng
        self._aggregates = aggregates
        self._tell = tell

    def publish(self, count: int, *, poison: bool = False) -> None:
        """Put `count` Kinesis records into the streams that exist."""
        existing = list(self._streams.current.values())
        for _ in range(count if existing else 0):
            stream = self._rng.choice(existing)
            several = (
                self._rng.randint(2, _MOST_IN_ONE) if self._rng.random() < self._aggregates else 1
            )
            self._put(stream, self._rng.randrange(KEYS), several, poison=poison)

    def publish_evenly(self) -> None:
        """Publish one event for every key of every stream."""
        for stream in list(self._streams.current.values()):
            for number in range(KEYS):
                self._put(stream, number, 1, poison=False)

    def _put(self, to: Generation, key_number: int, several: int, *, poison: bool) -> None:
        key = f"{to.label}-k{key_number}"
        ids = [self._next(key, poison and place == several - 1) for place in range(several)]
        payloads = [f"{one}|{key}|{number}".encode() for one, number in ids]
        data = payloads[0] if several == 1 else aggregated(key, payloads)
        world = self._streams.model_of(to.ref).world
        put = data_plane.put_record(world, {"StreamName": to.stream.name}, (key, data, None))
        arrival = world.now_millis()
        name = to.lease_name(put.shard_id)
        for place, (one, _) in enumerate(ids):
            position = Position(put.sequence_number, place)
            self._tell(one, Published(name, position, arrival, one.startswith(POISON)))

    def _next(self, key: str, poison: bool) -> tuple[str, int]:
        number = self._ledger.numbers[key]
        self._ledger.numbers[key] += 1
        return f"{POISON if poison else 'event'}-{key}-{number}", number


def aggregated(key: str, payloads: list[bytes]) -> bytes:
    """A KPL aggregate of user records with one partition key."""
    message = _field(1, key.encode()) + b"".join(
        _field(3, b"\x08\x00" + _field(3, payload)) for payload in payloads
    )
    return _MAGIC + message + hashlib.md5(message).digest()  # noqa: S324 (the format wants it)


def _field(number: int, value: bytes) -> bytes:
    size, length = bytearray(), len(value)
    while length >= _SEVEN_BITS:
        size.append(length % _SEVEN_BITS | _SEVEN_BITS)
        length //= _SEVEN_BITS
    return bytes([number << 3 | 2, *size, length]) + value


LeaseOf = Callable[[str, str, str], str]
"""The name of the lease of an event, from its id, and its columns `stream` and `shard_id`."""


def transform(lease_of: LeaseOf, records: pa.Table, *, hands_back: bool = False) -> pa.Table:
    """The user's transform: one row per event.

    It returns poison with an error if `hands_back` is set. Otherwise it raises `ValueError`.
    """
    if not records.num_rows:
        return NO_EVENTS
    texts = [data.decode().split("|") for data in records["data"].to_pylist()]
    ids, keys, numbers = zip(*texts, strict=True)
    poisoned = POISON in "".join(ids)
    if poisoned and not hands_back:
        raise ValueError(IS_POISON)
    shards = zip(ids, records["stream"].to_pylist(), records["shard_id"].to_pylist(), strict=True)
    leases = [lease_of(one, stream, shard) for one, stream, shard in shards]
    own = pa.array(list(zip(ids, keys, map(int, numbers), leases, strict=True)), _OWN).flatten()
    columns = [*own, records["sequence_number"], records["sub_sequence_number"]]
    events = pa.Table.from_arrays(columns, schema=EVENT_SCHEMA)
    if not poisoned:
        return events
    errors = [IS_POISON if one.startswith(POISON) else None for one in ids]
    return (
        events.append_column("_stream", records["stream"])
        .append_column("_shard_id", records["shard_id"])
        .append_column("_error", pa.array(errors, pa.string()))
    )
