"""Read many shards ahead of processing, within one limit of bytes."""

from __future__ import annotations

import math
import random
import sys
import threading
from collections.abc import Collection, Mapping
from typing import Final

from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.config import BatchSettings, RetrievalSettings
from kcl_pipeline.errors import ThrottledError
from kcl_pipeline.events import AwsTrouble, Event, EventSink, ReadFinished
from kcl_pipeline.kinesis.client import Chunk
from kcl_pipeline.kinesis.prefetch.chunks import split, with_oldest
from kcl_pipeline.kinesis.prefetch.pacing import LAGGING_FACTOR, Pace
from kcl_pipeline.kinesis.prefetch.pages import PageMemory
from kcl_pipeline.kinesis.prefetch.readers import Buffered, PushedReader, Reader, ReadState, Slot
from kcl_pipeline.memory import MemoryBudget

MAX_WAIT_SECONDS: Final = 0.2
"""Longest wait of a fetch thread, so that a shard that was added is read soon."""

MIN_WAIT_SECONDS: Final = 0.001
FULL_SECONDS: Final = 0.05
STOP_CHECK_SECONDS: Final = 0.1
TOLERATED_THROTTLES: Final = 5


class Prefetcher:
    """Reads many shards ahead of processing within one limit of bytes. Thread-safe.

    A read starts only while the buffer is below `prefetch_max_bytes`. Each running read counts as
    many bytes as the last read of its shard returned. So the limit is exceeded by at most one
    response per fetch thread. With a memory budget, a read also needs room in it, and the limit is
    a quarter of it at most. An error of one shard does not stop the others: the shard backs off,
    and `AwsTrouble` reports it. No lock is held during a read or a call of the event sink.
    """

    def __init__(
        self,
        settings: RetrievalSettings,
        clock: Clock,
        rng: random.Random,
        events: EventSink,
        memory: MemoryBudget | None = None,
    ) -> None:
        self._settings = settings
        self._pages = PageMemory(memory)
        self._max_cost = self._pages.limit(settings.prefetch_max_bytes)
        self._clock = clock
        self._rng = rng
        self._events = events
        self._lock = threading.Lock()
        self._slots: dict[str, Slot] = {}
        self._serial = 0
        self._bytes = self._records = self._cost = 0
        self._began = clock.monotonic()
        self._taken_at = -math.inf
        self._fresh = False
        self._arrival: StopSignal | None = None

    def payload_bytes(self, cost: int) -> int:
        """Return how many payload bytes of the buffer have about this many bytes in memory."""
        with self._lock:
            return cost * self._bytes // self._cost if self._cost else cost

    def ready_in(self, settings: BatchSettings) -> float | None:
        """Return the seconds after which the buffer should become a batch; None while it is empty.

        Records wait for others for the batch interval (`LAGGING_FACTOR` times as long if their
        shard was not read to its end). They do not wait when the buffer reaches a limit, and when
        no read is under way or due in that time. Records that are pushed may come at any time: with
        them, batches are taken at most once per interval.
        """
        interval = settings.min_batch_interval_millis / 1000
        with self._lock:
            slots = [slot for slot in self._slots.values() if not slot.held]
            heads = [slot.buffer[0] for slot in slots if slot.buffer]
            if not heads:
                return None
            if (
                self._records >= settings.max_batch_records
                or self._bytes >= settings.max_batch_bytes
                or self._cost >= self._max_cost
                or self._pages.is_full()
            ):
                return 0.0
            latest = min(
                head.fetched + interval * (LAGGING_FACTOR if head.chunk.millis_behind_latest else 1)
                for head in heads
            )
            reading = [slot for slot in slots if not slot.reader.ended]
            if not any(not s.pushed and (s.busy or s.pace.due < latest) for s in reading):
                pushed = any(slot.pushed for slot in reading)
                latest = min(latest, self._taken_at + interval) if pushed else -math.inf
        return max(latest - self._clock.monotonic(), 0.0)

    def add(self, reader: Reader) -> None:
        """Start reading a shard. A former reader of its lease is dropped with its buffer."""
        now = self._clock.monotonic()
        idle_seconds = self._settings.idle_time_between_reads_in_millis / 1000
        pace = Pace(idle_seconds, due=now, common_time=self._began)
        if isinstance(reader, PushedReader):
            pace = Pace(reader.poll_seconds, due=now, min_call_seconds=0.0)
        with self._lock:
            dropped = self._drop(reader.lease_key)
            self._slots[reader.lease_key] = Slot(
                reader, pace, now, isinstance(reader, PushedReader)
            )
        if dropped is not reader:
            _close(dropped)

    def remove(self, lease_key: str) -> None:
        """Stop reading a shard and drop its records, also those of a running read.

        Unknown keys are ignored.
        """
        with self._lock:
            dropped = self._drop(lease_key)
        _close(dropped)

    def step(self) -> float:
        """Read one shard, if one is due and the buffer is not full.

        Returns:
            Seconds until a shard may be due.
        """
        began = self._clock.monotonic()
        with self._lock:
            slot, wait = self._next(began)
            if slot is None:
                return wait
            slot.busy = True
            self._pages.begin_read()
        chunk: Chunk | None = None
        error: Exception | None = None
        try:
            chunk = slot.reader.read()
        except Exception as caught:  # noqa: BLE001 (reported below; the other shards continue)
            error = caught
        except BaseException:
            with self._lock:
                slot.busy = False
                self._pages.end_read()
            raise
        now = self._clock.monotonic()
        with self._lock:
            slot.busy = False
            events = (
                self._note_failure(slot, error, now)
                if error is not None
                else self._note_success(slot, chunk, began, now)
            )
            self._note_end_of_read()
        done = ReadFinished(slot.reader.lease_key, (now - began) * 1000, succeeded=error is None)
        for event in events if slot.pushed else (done, *events):
            self._events(event)
        return 0.0

    def take(
        self,
        max_records: int,
        max_bytes: int,
        *,
        left: Mapping[str, int] | None = None,
        turn: int = sys.maxsize,
    ) -> list[Chunk]:
        """Remove the oldest records from the buffer, up to both limits.

        Chunks of one lease are in shard order. A chunk that does not fit is split. If the first
        record exceeds `max_bytes`, it is returned alone, so that it does not block its shard.

        Args:
            max_records: Largest number of records.
            max_bytes: Largest number of payload bytes.
            left: Largest number of records per lease. Other leases have no limit.
            turn: After this many records of a lease, records of other leases are taken.
        """
        taken: list[Chunk] = []
        given: dict[str, int] = {}
        with self._lock:
            while (slot := self._oldest(given, left or {}, turn)) is not None and max_records > 0:
                head = slot.buffer[0]
                key = head.chunk.lease_key
                had = given.get(key, 0)
                part, rest = split(
                    head.chunk,
                    min(max_records, (left or {}).get(key, sys.maxsize) - had, turn - had % turn),
                    max_bytes,
                )
                if part is None and not taken:
                    part, rest = split(head.chunk, 1, head.chunk.bytes)
                if part is None:
                    break
                self._replace_head(slot, rest)
                taken.append(part)
                max_records -= part.records.num_rows
                max_bytes -= part.bytes
                given[key] = had + part.records.num_rows
            if taken:
                self._taken_at = self._clock.monotonic()
        return taken

    def hold(self, lease_keys: Collection[str]) -> None:
        """Keep the records of these shards, and read no more of them, until the next call.

        If the buffer is full, the shards are removed: the others need the room.
        """
        dropped: list[Reader | None] = []
        with self._lock:
            for key, slot in self._slots.items():
                slot.held = key in lease_keys
            if lease_keys and (self._cost >= self._max_cost or self._pages.is_full()):
                dropped = [self._drop(key) for key in lease_keys]
        for reader in dropped:
            _close(reader)

    def release_taken(self) -> None:
        """Release the memory of all records that were taken. Their batch has ended."""
        with self._lock:
            self._pages.release_taken()

    def lag(self) -> dict[str, int]:
        """Return the lag of each lease in milliseconds, if it is known.

        It is the age of the oldest buffered record. Without one it is the lag of the last response
        plus the time of failed reads since then.
        """
        now = self._clock.monotonic()
        known: dict[str, int] = {}
        with self._lock:
            for key, slot in self._slots.items():
                oldest = next(
                    (b.chunk.oldest_at for b in slot.buffer if b.chunk.oldest_at is not None), None
                )
                if oldest is not None:
                    known[key] = max(round((now - oldest) * 1000), 0)
                elif slot.behind is not None:
                    failing = now - slot.succeeded if slot.pace.failures else 0.0
                    known[key] = slot.behind + round(failing * 1000)
        return known

    def caught_up(self, lease_key: str) -> bool:
        """Return whether the shard was read to its latest record since it was added.

        False while records of it are buffered, and for unknown keys.
        """
        with self._lock:
            slot = self._slots.get(lease_key)
            return slot is not None and slot.reached_tip and not slot.buffer

    def state_of(self, lease_key: str) -> ReadState | None:
        """Return the progress of reading a shard; None for unknown keys."""
        with self._lock:
            slot = self._slots.get(lease_key)
            if slot is None:
                return None
            waiting, up_to = bool(slot.buffer), slot.reader.read_up_to_millis
            caught_up = slot.reached_tip and not waiting
            return ReadState(slot.read_at, waiting, caught_up, slot.error, up_to, slot.behind)

    def busy(self, lease_key: str) -> bool:
        """Return whether a read of the shard runs, or has not buffered its records yet."""
        with self._lock:
            slot = self._slots.get(lease_key)
            return slot is not None and slot.busy

    def wait_for_data(self, stop: StopSignal, seconds: float) -> bool:
        """Wait until a read ends and records are buffered, `stop` is set, or `seconds` have passed.

        Returns:
            Whether a read has ended since the last call, and records were buffered then.
        """
        deadline = self._clock.monotonic() + seconds
        while not stop.is_set():
            with self._lock:
                if self._fresh:
                    self._fresh = False
                    return True
                arrival = self._arrival = self._clock.signal()
            left = deadline - self._clock.monotonic()
            if left <= 0:
                break
            arrival.wait(min(left, STOP_CHECK_SECONDS))
        return False

    # The methods below need the lock.

    def _next(self, now: float) -> tuple[Slot | None, float]:
        idle = [
            slot
            for slot in self._slots.values()
            if not (slot.busy or slot.held or slot.reader.ended)
        ]
        if not idle:
            return None, MAX_WAIT_SECONDS
        slot = min(idle, key=lambda s: s.pace.due)
        if slot.pace.due > now:
            return None, min(max(slot.pace.due - now, MIN_WAIT_SECONDS), MAX_WAIT_SECONDS)
        under_way = sum(s.last_cost for s in self._slots.values() if s.busy)
        if self._cost + under_way >= self._max_cost or not self._pages.may_read():
            return None, FULL_SECONDS
        return slot, 0.0

    def _note_success(
        self, slot: Slot, chunk: Chunk | None, began: float, now: float
    ) -> tuple[Event, ...]:
        reader = slot.reader
        behind = reader.millis_behind_latest
        at_tip = behind == 0 or (behind is None and chunk is None and not slot.pushed)
        slot.pace.succeeded(
            began, size=reader.last_bytes, at_tip=chunk is None if slot.pushed else at_tip
        )
        slot.succeeded = slot.read_at = now
        slot.error, slot.behind = None, behind
        if self._slots.get(reader.lease_key) is not slot:
            self._pages.end_read()
            return ()
        slot.reached_tip = slot.reached_tip or at_tip or reader.ended
        slot.last_cost = 0
        if chunk is None:
            self._pages.end_read()
        else:
            slot.last_cost = max(chunk.bytes, chunk.records.get_total_buffer_size())
            self._serial += 1
            chunk = with_oldest(chunk, now)
            page = self._pages.end_read_with(slot.last_cost)
            slot.buffer.append(Buffered(self._serial, chunk, page, now))
            self._add_up(slot.buffer[-1], 1)
            if chunk.rejected is not None:
                return (chunk.rejected,)
        return ()

    def _note_end_of_read(self) -> None:
        """Wake the waiting thread: the records may not have to wait any longer (`ready_in`)."""
        if any(slot.buffer and not slot.held for slot in self._slots.values()):
            self._fresh = True
            if self._arrival is not None:
                self._arrival.set()

    def _note_failure(self, slot: Slot, error: Exception, now: float) -> tuple[Event, ...]:
        throttled = isinstance(error, ThrottledError)
        slot.pace.failed(now, self._rng, throttled=throttled)
        self._pages.end_read()
        if self._slots.get(slot.reader.lease_key) is not slot:
            return ()
        slot.error = f"{type(error).__name__}: {error}"
        if throttled and slot.pace.failures % TOLERATED_THROTTLES != 0:
            return ()
        return (AwsTrouble(f"read of {slot.reader.lease_key}", slot.error),)

    def _oldest(self, given: Mapping[str, int], left: Mapping[str, int], turn: int) -> Slot | None:
        waiting = [
            (key, slot)
            for key, slot in self._slots.items()
            if slot.buffer and not slot.held and given.get(key, 0) < left.get(key, sys.maxsize)
        ]
        return min(
            waiting,
            key=lambda item: (given.get(item[0], 0) // turn, item[1].buffer[0].serial),
            default=(None, None),
        )[1]

    def _replace_head(self, slot: Slot, rest: Chunk | None) -> None:
        head = slot.buffer.popleft()
        self._add_up(head, -1)
        self._pages.take(head.page, is_split=rest is not None)
        if rest is not None:
            # The whole table stays in memory until its last part is taken.
            slot.buffer.appendleft(Buffered(head.serial, rest, head.page, head.fetched))
            self._add_up(slot.buffer[0], 1)

    def _add_up(self, buffered: Buffered, sign: int) -> None:
        self._bytes += sign * buffered.chunk.bytes
        self._records += sign * buffered.chunk.records.num_rows
        self._cost += sign * buffered.page.cost

    def _drop(self, lease_key: str) -> Reader | None:
        slot = self._slots.pop(lease_key, None)
        if slot is None:
            return None
        for buffered in slot.buffer:
            self._add_up(buffered, -1)
            self._pages.release(buffered.page)
        slot.buffer.clear()
        return slot.reader


def _close(reader: Reader | None) -> None:
    if isinstance(reader, PushedReader):
        reader.close()
