"""Streams that the application does not read any more, and their leases (protocol §8.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leader.lock import Leadership
from kcl_pipeline.leader.phase import CycleContext
from kcl_pipeline.leader.streams.streams import Streams
from kcl_pipeline.leases.application.recorded_stream import AccountAndName, RecordedStream
from kcl_pipeline.leases.tables import CoordinatorStateTable
from kcl_pipeline.planning.cleanup import Deletion
from kcl_pipeline.shards import StreamId

MIN_ANSWERS: Final = 3
"""Usable answers of a selection that must lack a stream before it is removed."""

_KEPT: Final = "NO_STREAMS_LEASES_DELETION"
_PROVIDED: Final = "PROVIDED_STREAMS_DEFERRED_DELETION"


@dataclass(frozen=True, slots=True)
class _Missing:
    since: float
    answers: int


class FormerStreams:
    """Removes former streams by the chosen strategy, and adopts those that have leases only.

    A former stream is recorded or has leases, but is not configured. It is removed in two steps:
    the record, so that no leader creates its leases again, then its leases. The waiting times are
    in memory: another leader begins them again. It finds the rest of the leases without a record.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        coordinator_table: CoordinatorStateTable,
        clock: Clock,
        streams: Streams,
        leadership: Leadership,
        delete: Callable[[CycleContext, Iterable[Deletion]], None],
    ) -> None:
        self._settings = settings.shard_sync
        self._coordinator_table = coordinator_table
        self._clock = clock
        self._streams = streams
        self._leadership = leadership
        self._delete = delete
        self._term = 0
        self._missing: dict[AccountAndName, _Missing] = {}
        self._removing: set[AccountAndName] = set()

    def clean(self, context: CycleContext) -> None:
        """Remove streams whose waiting time has passed, with their leases.

        Raises:
            NotLeadingError: This process does not lead any more.
            AwsError: The record cannot be read or written.
        """
        if not self._streams.are_known():
            return
        if self._term != self._leadership.term:
            self._term = self._leadership.term
            self._missing.clear()
            self._removing.clear()
        former = {one.account_and_name: one for one in self._streams.former()}
        orphans = self._orphans(context)
        self._streams.adopt(orphans - self._removing - self._removable(orphans))
        candidates = self._removable({*former, *orphans})
        self._removing &= orphans
        for identity in sorted(self._due(candidates), key=str):
            if identity in orphans or self._forget(former[identity]):
                self._removing.add(identity)
        self._delete_leases(context)

    def _orphans(self, context: CycleContext) -> set[AccountAndName]:
        """Return the streams that have leases, and are neither configured nor recorded."""
        of_leases = {StreamId.parse(text) for text in context.leases.streams()}
        found = {(stream.account, stream.name) for stream in of_leases}
        return self._streams.not_configured(found - self._streams.identities())

    def _removable(self, identities: set[AccountAndName]) -> set[AccountAndName]:
        strategy = self._settings.former_streams_leases_deletion_strategy
        if strategy == _KEPT:
            return set()
        if strategy != _PROVIDED:
            return identities
        return {
            (account, name)
            for account, name in identities
            for given in self._settings.former_streams
            if given == name or given.endswith(f":{account}:stream/{name}")
        }

    def _due(self, candidates: set[AccountAndName]) -> set[AccountAndName]:
        """Return the streams that have been missing for long enough. Others begin to wait."""
        now, answers = self._clock.monotonic(), self._streams.answers
        self._missing = {
            identity: self._missing.get(identity, _Missing(now, answers or 0))
            for identity in candidates
        }
        wait = self._settings.wait_period_to_delete_former_streams_millis / 1000
        return {
            identity
            for identity, missing in self._missing.items()
            if (now - missing.since >= wait or self._streams.does_not_exist(identity))
            and (answers is None or answers - missing.answers >= MIN_ANSWERS)
        }

    def _forget(self, stream: RecordedStream) -> bool:
        """Remove a stream from the record. False: another process changed the record."""
        record = self._coordinator_table.read_application()
        if record is None:
            return False
        others = tuple(one for one in record.identity.streams if one.arn != stream.arn)
        if not others:
            return False
        self._leadership.check()
        after = replace(record.identity, streams=others)
        if not self._coordinator_table.put_application(after, replacing=record):
            return False
        self._streams.note_record(after)
        return True

    def _delete_leases(self, context: CycleContext) -> None:
        if not self._removing:
            return
        streams = (StreamId.parse(text) for text in sorted(context.leases.streams()))
        found = [
            Deletion(lease, "its stream is not read any more")
            for stream in streams
            if (stream.account, stream.name) in self._removing
            for lease in context.leases.of_stream(stream)
        ]
        self._delete(context, found)
