"""Decide in which cycles a leader scans the tables, and detect changes in the others.

While nothing happens, a cycle reads the worker metrics rows, and one lease of each worker that may
have renewed since. It scans both tables:

- when `lease_assignment_interval_millis` has passed since the last scan;
- when a worker has joined, left or changed, or announces that its leases have changed;
- when a worker was not seen to renew for half of the failover time;
- when a lease needs the leader: it has no owner, is in a handoff, was not renewed by its owner yet,
  or its owner does not announce changes, as a Java worker;
- when the last cycle had moves, errors or new leases;
- when the fleet is balanced once more after a worker has joined;
- while the application is paused, or an operator wants it to be balanced.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AwsError
from kcl_pipeline.events import AwsTrouble, EventSink
from kcl_pipeline.leader.balance_schedule import BalanceSchedule
from kcl_pipeline.leader.lease_map import LeaseMap
from kcl_pipeline.leader.liveness.liveness import Liveness
from kcl_pipeline.leader.phase import CycleContext, Deadline
from kcl_pipeline.leader.reads.tables import TableReads, choose_probes
from kcl_pipeline.leader.streams.streams import Streams
from kcl_pipeline.leader.sync.shards import ShardSync
from kcl_pipeline.leases.lease.rejected import RejectedRows

SCANS_AFTER_CHANGE: Final = 2
"""Further scans after one that found a change of the workers. It may have been too early for the
changes of their leases, because reads are eventually consistent.
"""


class LeaderReads:
    """The reads of one leader.

    Args:
        settings: The longest time between two scans.
        tables: Reads the tables.
        liveness: Has observed the rows.
        streams: The streams. One without leases needs a scan.
        sync: Creates leases.
        balance: Balances the leases after a worker has joined.
        clock: The clock.
        events: Receives events.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        tables: TableReads,
        liveness: Liveness,
        streams: Streams,
        sync: ShardSync,
        balance: BalanceSchedule,
        clock: Clock,
        events: EventSink,
    ) -> None:
        self._tables = tables
        self._interval_seconds = settings.lease_assignment_interval_millis / 1000
        self._liveness = liveness
        self._streams = streams
        self._sync = sync
        self._balance = balance
        self._clock = clock
        self._events = events
        self._rejected = RejectedRows(events)
        self._last: CycleContext | None = None
        """The last cycle with a scan. None: the next cycle must scan."""
        self._scans_left = 0
        self._membership: Hashable = None
        self._probes: dict[str, str] = {}

    def restart(self) -> None:
        """Scan in the next cycle, at the start of a term."""
        self._last = None

    def read(self, deadline: Deadline, *, must_scan: bool = False) -> CycleContext:
        """Check for changes, scan if there may be some, and return the context of the cycle.

        Args:
            deadline: The deadline of the cycle.
            must_scan: Whether to scan in any case.
        """
        unchanged = None if must_scan else self._unchanged(deadline)
        return unchanged or self._scanned(deadline)

    def _unchanged(self, deadline: Deadline) -> CycleContext | None:
        last = self._last
        if (
            last is None
            or self._scans_left > 0
            or self._clock.monotonic() - last.scan_started >= self._interval_seconds
        ):
            return None
        if self._balance.must_look(self._clock.monotonic()):
            return None
        if self._is_a_stream_new(last) or self._has_changed():
            self._scans_left = SCANS_AFTER_CHANGE + 1
            return None
        now = self._clock.monotonic()
        return replace(
            last,
            workers=self._liveness.living(now),
            deadline=deadline,
            created=[],
            deleted=[],
            plan=None if last.plan is None else replace(last.plan, moves=()),
            errors=[],
            age_seconds=now - last.scan_started,
        )

    def _is_a_stream_new(self, last: CycleContext) -> bool:
        """Resolve the streams. Return whether one cannot be resolved, or has no leases."""
        errors: list[Exception] = []
        self._streams.for_each(lambda _stream: None, errors)
        return bool(errors) or not all(last.leases.of_stream(one) for one in self._streams.known())

    def _has_changed(self) -> bool:
        renewals, began = self._liveness.renewals, self._clock.monotonic()
        due = {owner: key for owner, key in self._probes.items() if renewals.is_due(owner, began)}
        try:
            found, _ = self._tables.probe(due.values())
        except (AwsError, ValueError) as error:
            self._events(AwsTrouble("check for changes by the leader", str(error)))
            return True
        for owner, key in due.items():
            lease = found.get(key)
            if lease is None or lease.owner != owner or lease.in_handoff or lease.ended:
                return True
        now = self._clock.monotonic()
        return self._liveness.membership(now) != self._membership or self._is_one_silent(now)

    def _is_one_silent(self, now: float) -> bool:
        return any(self._liveness.renewals.is_silent(owner, now) for owner in self._probes)

    def _scanned(self, deadline: Deadline) -> CycleContext:
        self._last = None
        found = self._tables.scan()
        self._rejected.note_all(found.bad_rows)
        return CycleContext(
            leases=LeaseMap(found.leases),
            bad_rows=found.bad_rows,
            unreadable=found.unreadable,
            workers=self._liveness.living(found.scan_started),
            scan_started=found.scan_started,
            deadline=deadline,
        )

    def note_scan(self, context: CycleContext) -> None:
        """Decide after a cycle with a scan whether the next cycle may do without."""
        now = self._clock.monotonic()
        membership = self._liveness.membership(now)
        self._scans_left = max(self._scans_left - 1, 0)
        if membership != self._membership:
            # The change may have come after the leases were read
            self._membership, self._scans_left = membership, SCANS_AFTER_CHANGE
        self._probes = choose_probes(context.leases.values(), self._probes)
        is_finished = (
            not self._tables.is_small(len(context.leases), len(self._probes))
            and not self._is_unfinished(context, now)
            and all(map(self._liveness.is_settled, context.leases.values()))
            and not self._is_one_silent(now)
        )
        self._last = context if is_finished else None

    def _is_unfinished(self, context: CycleContext, now: float) -> bool:
        plan = context.plan
        return (
            plan is None
            or bool(plan.moves or context.created or context.deleted or context.errors)
            or context.deadline.passed()
            or self._sync.is_unfinished
            or self._balance.is_joining(now)
        )
