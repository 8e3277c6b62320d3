"""Safety invariants of the sink's log, checked on every entry, and of the lease table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from kcl_pipeline.position import AT_TIMESTAMP, LATEST, TRIM_HORIZON, Position, StoredPosition
from kcl_pipeline.testing.sink import LogEntry
from verification.simulation.checks.leases import BrokenInvariantError, LeaseChecks, sibling
from verification.simulation.environment.streams import Generation
from verification.simulation.environment.traffic import EVENT_SCHEMA, IS_BROKEN, Ledger, Published
from verification.simulation.scenario import BEGIN_MILLIS


@dataclass(frozen=True, slots=True)
class Begun:
    """The state when a write started: excuses by lease, and the number of committed rows."""

    excuses: Mapping[str, int]
    landings: int


@dataclass
class Checks(LeaseChecks):
    """Checks every change of the lease table and the sink's log.

    Raises `BrokenInvariantError` at once.

    Attributes:
        committed: Number of rows in the table per event.
        lost: Events that left retention unread, or were set aside while the transform was broken.
        is_put_back: Whether a copy of the table was put back. Then the order of rows is free.
        rewinds: How many times events in the table were to be read again.
    """

    ledger: Ledger = field(default_factory=Ledger)
    committed: Counter[str] = field(default_factory=Counter)
    lost: set[str] = field(default_factory=set)
    is_put_back: bool = False
    rewinds: int = 0
    _last_number: dict[str, int] = field(default_factory=dict)
    _excused_at: dict[str, int] = field(default_factory=dict)
    _begun: Begun | None = None
    _landings: int = 0
    _landed_at: dict[str, int] = field(default_factory=dict)
    _numbered_at: dict[str, int] = field(default_factory=dict)
    _numbered_excuses: dict[str, int] = field(default_factory=dict)
    _waiting: set[str] = field(default_factory=set)
    _trimmed_before: int = 0
    _named: set[tuple[str, str, str]] = field(default_factory=set)
    """Leases with the columns that name them: the columns of a record, `stream` and `shard_id`."""
    _ended: set[str] = field(default_factory=set)
    """Shards that have ended in a table that stores positions."""

    def lease_of(self, one: str, column: str, shard_id: str) -> str:
        """The name of an event's lease, if the columns of its record name the stream and shard."""
        name = self.ledger.events[one].lease_name
        if (name, column, shard_id) in self._named:
            return name
        stream = self.streams.of_name(name)
        if stream is None or stream.lease_name(shard_id) != name:
            return f"{column}:{shard_id}"
        if stream.has_column(column):
            self._named.add((name, column, shard_id))
            return name
        is_alone = column == stream.stream.name and column in self.streams.forgotten
        return name if is_alone else f"{column}:{shard_id}"

    def name_of_key(self, key: str) -> str:
        """Return the name of the lease of a shard's key in a sink, with or without application."""
        arn, created, shard_id = key[key.index("arn:") :].rsplit("/", 2)
        stream = next(
            one
            for one in reversed(self.streams.all)
            if one.stream.arn == arn and one.stream.created_millis // 1000 == int(created)
        )
        return stream.lease_name(shard_id)

    def begins(self, keys: Iterable[str]) -> Begun:
        """Return the current excuses of these leases, for a write that starts now."""
        return Begun({key: self._excuses[key] for key in keys}, self._landings)

    @contextmanager
    def begun_at(self, begun: Begun) -> Iterator[None]:
        """Treat commits in this context as writes that started at `begun`.

        A lease that was lost since then may be read again.
        """
        self._begun = begun
        yield
        self._begun = None

    def _is_overtaken(self, lease_key: str, landing: int | None) -> bool:
        """Whether another write was committed after this one started, and the lease was lost.

        An at-least-once sink does not fence its writer. When the writer was paused, its rows can
        come after those of the lease's next owner.
        """
        begun = self._begun
        return (
            not self.scenario.exactly_once
            and begun is not None
            and landing is not None
            and landing > begun.landings
            and self._excuses[lease_key] > begun.excuses[lease_key]
        )

    def trimmed(self, before_millis: int) -> None:
        """Note that older records left retention; those that are not committed may be missing."""
        self.coverage_suspended = True
        self._trimmed_before = max(self._trimmed_before, before_millis)
        self.lost |= {
            one
            for one, event in self.ledger.events.items()
            if event.arrival_millis < before_millis and one not in self.committed
        }

    def deleted(self, stream: Generation) -> None:
        """Note that a stream was deleted; its records that are not committed may be missing."""
        self.lost |= {
            one
            for one in self._waiting
            if self.streams.of_name(self.ledger.events[one].lease_name) is stream
        }

    def dead_lettered(self, records: pa.Table) -> None:
        """Note dead letters, which count as processed.

        A broken transform may set any record aside.
        """
        for number, sub, data, error in _columns(
            records, ("sequence_number", "sub_sequence_number", "data", "error")
        ):
            one = data.decode().partition("|")[0]
            self._settle(self.ledger.events[one].lease_name, Position(number, sub))
            if IS_BROKEN in error:
                self.lost.add(one)

    def taken_out(
        self,
        entries: Iterable[LogEntry],
        objects: Mapping[str, pa.Table],
        positions: Mapping[str, StoredPosition],
    ) -> None:
        """Note that a copy of the table was put back, without these entries.

        Nobody notices that it lacks the records of a shard that has ended. And a child may be
        committed whose ancestors have not ended in the copy.
        """
        self.is_put_back = True
        files = [file.path for entry in entries for file in entry.files]
        ids = {one for path in files for one in objects[path]["id"].to_pylist()}
        self._read_again(ids)
        for one in ids:
            row = self.lease(self.ledger.events[one].lease_name)
            if row is None or row.ended:
                self.lost.add(one)
        named = {self.name_of_key(key): one for key, one in positions.items()}
        self.stored = set(named)
        self._ended = {name for name, one in named.items() if one.ended}

    def _sought(self, names: Collection[str]) -> None:
        """Note that a seek to TRIM_HORIZON has removed the positions of these leases."""
        self._ended -= set(names)
        for name in names:
            self._settled.pop(name, None)
        events = self.ledger.events.items()
        self._read_again({one for one, event in events if event.lease_name in names})

    def _read_again(self, ids: Collection[str]) -> None:
        """Expect these events once more, unless they cannot be read any more."""
        self.rewinds += 1
        for one in ids:
            event = self.ledger.events[one]
            if self.committed.pop(one, 0) and not event.poison:
                stream = self.streams.of_name(event.lease_name)
                is_there = stream is not None and self.streams.exists(stream)
                is_kept = is_there and event.arrival_millis >= self._trimmed_before
                (self._waiting if is_kept else self.lost).add(one)
        # The next row of each key may be any of them; from then on their order counts.
        self._last_number.clear()

    def landed(self, entry: LogEntry, objects: Mapping[str, pa.Table]) -> None:
        """Check S4 (no repetition) and S5 (parents first, order per key) on one commit."""
        batched = {self.name_of_key(key): one for key, one in entry.positions.items()}
        if is_seek(entry):
            self._sought(batched)
            return
        if self.scenario.exactly_once:
            self.stored |= batched.keys()
            self._ended |= {name for name, one in batched.items() if one.ended}
        for file in entry.files:
            for one, key, number, lease_key, sequence_number, sub in _columns(
                objects[file.path], EVENT_SCHEMA.names
            ):
                event = self.ledger.events.get(one)
                self._is_of_its_batch(one, event, lease_key, sequence_number, sub, batched)
                event = self._row_landed(one, event, key, number, lease_key)
                self._settle(lease_key, event.position)
                if self.scenario.exactly_once:
                    # Without numbers in a log, a successor does not find this; it begins at LATEST
                    # again until there is a checkpoint.
                    self._first.setdefault(lease_key, event.position)
        for lease_key in batched:
            self._parents_ended(lease_key)

    def _is_of_its_batch(
        self,
        one: str,
        event: Published | None,
        lease_name: str,
        sequence_number: str,
        sub: int,
        batched: Collection[str],
    ) -> None:
        """S15: a row has the position of its event, and is committed under its own lease."""
        if event is None:
            return
        at = event.position
        is_there = at.sequence_number == sequence_number and at.sub_sequence_number == sub
        if not is_there or event.lease_name not in batched:
            raise BrokenInvariantError(
                f"S15: {one} of {event.lease_name} at {at} was committed as "
                f"{Position(sequence_number, sub)} of {lease_name} under {sorted(batched)}"
            )

    def _row_landed(
        self, one: str, event: Published | None, key: str, number: int, lease_key: str
    ) -> Published:
        """Check one row; return its event."""
        again = one in self.committed
        self.committed[one] += 1
        self._waiting.discard(one)
        if event is None or event.lease_name != lease_key:
            raise BrokenInvariantError(f"S4: {one} of {lease_key} was never published there")
        if self._created_at.get(lease_key) == AT_TIMESTAMP and event.arrival_millis < BEGIN_MILLIS:
            raise BrokenInvariantError(
                f"S4: {one} of {lease_key} is older than the timestamp where reading starts"
            )
        if again:
            self._may_repeat(one, lease_key)
        elif number <= self._last_number.get(key, -1):
            self._may_be_late(one, key, event)
        self._landings += 1
        self._landed_at[one] = self._landings
        excuses = self._excuses if self._begun is None else self._begun.excuses
        self._excused_at[one] = excuses[lease_key]
        if number >= self._last_number.get(key, -1):
            self._last_number[key], self._numbered_at[key] = number, self._landings
            self._numbered_excuses[key] = excuses[lease_key]
        return event

    def _may_be_late(self, one: str, key: str, event: Published) -> None:
        """S5: whether a first row may come after a later one of its key.

        The next owner of a lease may not read the batch that its paused predecessor still writes.
        With LATEST and no checkpoint, it starts after that batch. With any position, the records
        may have left retention. Those rows are not guaranteed, and their writer is not fenced.
        An at-least-once sink may get the range of the later row again. Then a record that was a
        dead letter the first time, because the transform was broken, can land.
        """
        lease_key = event.lease_name
        first = self._first.get(lease_key)
        is_repeated = (
            not self.scenario.exactly_once
            and one in self.lost
            and self._excuses[lease_key] > self._numbered_excuses.get(key, self._excuses[lease_key])
        )
        if (
            lease_key in self.replayed
            or self.is_put_back
            or is_repeated
            or (
                self._is_overtaken(lease_key, self._numbered_at.get(key))
                and (
                    one in self.lost
                    or (
                        self._created_at.get(lease_key) == LATEST
                        and (first is None or event.position < first)
                    )
                )
            )
        ):
            return
        raise BrokenInvariantError(
            f"S5: {one} of {lease_key} entered the table after number "
            f"{self._last_number[key]} of its key"
        )

    def _may_repeat(self, one: str, lease_key: str) -> None:
        if (
            lease_key in self.replayed
            or (not self.scenario.exactly_once and self._excuses[lease_key] > self._excused_at[one])
            or self._is_overtaken(lease_key, self._landed_at.get(one))
        ):
            return
        raise BrokenInvariantError(
            f"S4: {one} of {lease_key} is in the table twice"
            + ("" if self.scenario.exactly_once else ", and nothing excuses it")
        )

    def _settle(self, lease_key: str, position: Position) -> None:
        self._settled[lease_key] = max(position, self._settled.get(lease_key, TRIM_HORIZON))

    def _parents_ended(self, lease_key: str) -> None:
        lease = self.lease(lease_key)
        if lease is None or lease_key in self.replayed or self.is_put_back:
            return
        for parent in lease.parent_shard_ids:
            row = self.lease(sibling(lease, parent))
            late = row is not None and self._is_late_and_empty(row.unique_key, lease_key)
            ended = row is not None and (row.ended or row.unique_key in self._ended)
            if row is not None and not ended and not late:
                raise BrokenInvariantError(
                    f"S5: {lease_key} was committed before its parent {parent} had ended"
                )

    def _is_late_and_empty(self, parent: str, child: str) -> bool:
        """Whether a parent's lease was created after the child's and has no records to read.

        A leader that was paused in its first shard sync can create the lease of a shard that was
        closed meanwhile. Its successor has then listed the stream again and started at the
        children. With LATEST, or a timestamp after the parent's last record, no record of the
        parent is read.
        """
        if self._order.index(parent) < self._order.index(child):
            return False
        if self._created_at[parent] == AT_TIMESTAMP:
            return not any(
                event.lease_name == parent and event.arrival_millis >= BEGIN_MILLIS
                for event in self.ledger.events.values()
            )
        return self._created_at[parent] == LATEST

    def missing(self) -> set[str]:
        """Events that are not committed and not excused by transform, retention or position."""
        self._waiting -= self.lost
        if not self._waiting or self.scenario.initial_position == "TRIM_HORIZON":
            return set(self._waiting)
        unread = self._unread_shards() if self.scenario.initial_position == "LATEST" else set()
        return {
            one
            for one in self._waiting
            if not self._before_the_begin(self.ledger.events[one], unread)
        }

    def published(self, one: str, event: Published) -> None:
        """Record that an event was acknowledged."""
        self.ledger.events[one] = event
        if not event.poison:
            self._waiting.add(one)

    def _before_the_begin(self, event: Published, unread: set[str]) -> bool:
        """Whether the event is before the position at which its lease starts.

        With LATEST that is the time in the row when it was created, or the first position that was
        processed if the row had no time. A row that was deleted by hand before anything was
        committed takes both with it.
        """
        if self.scenario.initial_position == "AT_TIMESTAMP":
            return event.arrival_millis < BEGIN_MILLIS
        if event.lease_name in self.passed_over:
            return True
        if self._created_at.get(event.lease_name) != LATEST:
            return event.lease_name in unread
        begin = self._begins_at.get(event.lease_name)
        if begin is not None:
            return event.arrival_millis < begin
        first = self._first.get(event.lease_name)
        return first is None or event.position < first

    def _unread_shards(self) -> set[str]:
        """Names of leases of unread shards, which had closed when the first leases were created.

        Neither they nor an ancestor ever had a lease. Or a paused leader created the ancestor's
        lease in its first shard sync, after a descendant's lease had started at LATEST.
        """
        found: set[str] = set()
        for stream in self.streams.current.values():
            since: dict[str, int] = {}
            for shard in self.streams.settled(stream).shards:
                key = stream.lease_name(shard.shard_id)
                if key in self._created_at:
                    since[shard.shard_id] = self._order.index(key)
                    continue
                at = min((since[one] for one in shard.parents if one in since), default=None)
                if at is None or self._is_begun_behind(stream, shard.shard_id, at):
                    found.add(key)
                else:
                    since[shard.shard_id] = at
        return found

    def _is_begun_behind(self, stream: Generation, shard_id: str, at: int) -> bool:
        """Whether a descendant started at LATEST before lease number `at` was created."""
        behind, begun = {shard_id}, set(self._order[:at])
        for shard in stream.stream.shards:
            if behind.intersection(shard.parents):
                behind.add(shard.shard_id)
                key = stream.lease_name(shard.shard_id)
                if key in begun and self._created_at[key] == LATEST:
                    return True
        return False


def is_seek(entry: LogEntry) -> bool:
    """Whether an entry is the commit of a seek to TRIM_HORIZON: nothing else removes a position."""
    positions = entry.positions.values()
    return not entry.files and any(one.position is None and not one.ended for one in positions)


def _columns(table: pa.Table, names: tuple[str, ...] | list[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(table[name].to_pylist() for name in names), strict=True)
