"""Combined commits: when many writers share a log, each commit takes along the batches that others
have announced (docs/decisions/0003-combined-commits.md).

An announcement is one small object beside the log: the files of a prepared batch and, per lease,
its number and the two numbers it expects (`announcements`). Any writer may commit it, at any later
time and also after its owner died, if and only if the table has **exactly** the expected numbers:
so it lands once or never, no matter who tries. The numbers of a lease never come back to what they
were, so an announcement that does not match any more can never land. Losing the race for a version
then costs nothing: the winner has usually taken the batch along.

What others wrote is checked before it is used (`announcements` says what and why). An announcement
that fails is removed, or ignored by this process where it cannot be removed, with an event. It
never fails a commit of another worker.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from kcl_pipeline.batch import DataFile, TxnVersions
from kcl_pipeline.clock import Clock
from kcl_pipeline.delta.announcements import (
    FOLDER,
    MAX_ANNOUNCEMENT_BYTES,
    AnnouncementError,
    OtherFormatError,
    PreparedBatch,
    announcement_name,
    check_layout,
    decoded,
    encoded,
    is_announcement,
)
from kcl_pipeline.delta.errors import bounded, first_line
from kcl_pipeline.delta.log.delta_log import DeltaLog
from kcl_pipeline.delta.storage.objects import StoredObject, UnsafeObjectError
from kcl_pipeline.delta.storage.storage import Storage
from kcl_pipeline.events import AnnouncementRejected, EventSink, ignore_events

MAX_PIGGYBACKED: Final = 64
"""Batches of others in one commit."""
MAX_PIGGYBACKED_ITEMS: Final = 10_000
"""Files and leases of others in one commit."""
MAX_HELD_BYTES: Final = 16 * MAX_ANNOUNCEMENT_BYTES
"""Announcements that one process keeps; further ones are read once these are settled."""
MAX_LISTED: Final = 10_000
MAX_READ: Final = 100
"""Announcements that one look reads, or rejects unread; the rest is met by the next one."""
_CROWDED: Final = 1.2
_POLL_SECONDS: Final = 0.004
_LONGEST_ATTEMPT_SECONDS: Final = 0.5
_LOG: Final = logging.getLogger(__name__)


class Pace:
    """How crowded the log is, and how long to wait for others before trying oneself: long enough
    that about one of the waiting writers tries at a time.
    """

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._batches_per_commit = 1.0
        self._attempt_seconds = 2 * _POLL_SECONDS

    @property
    def crowded(self) -> bool:
        """Whether other writers were in the way lately."""
        return self._batches_per_commit > _CROWDED

    def lost(self, batches: int) -> None:
        """Another writer had the version first, when this many batches were waiting to land."""
        self._batches_per_commit = max(self._batches_per_commit, 2.0, float(batches))

    def landed(self, batches: float) -> None:
        """A commit landed, with this many batches in it."""
        self._batches_per_commit += (max(batches, 1.0) - self._batches_per_commit) / 4

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Measures one attempt. The shortest ones count: the others say how busy this machine is,
        and waiting for that too would feed on itself.
        """
        began = self._clock.monotonic()
        yield
        seconds = min(max(self._clock.monotonic() - began, _POLL_SECONDS), _LONGEST_ATTEMPT_SECONDS)
        self._attempt_seconds = min(
            seconds, self._attempt_seconds + (seconds - self._attempt_seconds) / 32
        )

    def polls(self) -> Iterator[None]:
        """Wait, and come back now and then to look; ends when it is time to try oneself."""
        patience = self._rng.uniform(0, 2 * self._batches_per_commit * self._attempt_seconds)
        pause = max(self._attempt_seconds / 2, _POLL_SECONDS)
        for _ in range(math.ceil(patience / pause)):
            self._clock.sleep(pause)
            yield


class AnnouncementStore:
    """The announcements of one table.

    Every failure here is survived: a batch that cannot be announced is committed by its owner
    alone, and an announcement that cannot be used is left to its owner.
    """

    def __init__(self, storage: Storage, events: EventSink = ignore_events) -> None:
        self._storage = storage
        self._events = events
        self._known: dict[str, tuple[PreparedBatch, int]] = {}
        self._ignored: set[str] = set()

    def announce(self, batch: PreparedBatch, log: DeltaLog) -> PreparedBatch:
        """Make the batch known to all writers.

        Returns:
            The batch with the name of its announcement, or as it was when that failed.
        """
        try:
            named = replace(batch, layout=log.layout().digest)
            named = replace(named, name=announcement_name(named))
            data = encoded(named)
            check_layout(decoded(data, named.name), log.layout())  # as the others will
            self._storage.write(named.name, data)
        except (OSError, AnnouncementError) as error:
            _LOG.warning(
                "a batch could not be announced and is committed alone: %s", first_line(error)
            )
            return batch
        return named

    def remove(self, batches: Iterable[PreparedBatch]) -> None:
        """Delete announcements that have landed or never can."""
        for batch in batches:
            if batch.name:
                self._delete(batch.name)

    def reject(self, names: Iterable[str], reason: str) -> None:
        """Remove announcements that cannot be used; those that stay are never read again here."""
        for name in names:
            self._reject(name, reason)

    def piggybacked(
        self, log: DeltaLog, own: PreparedBatch | None = None
    ) -> tuple[PreparedBatch, ...]:
        """Announced batches that may land on the log's version together with `own`: exactly the
        expected numbers, no lease twice, files that are there.

        What was announced before the previous call and does not match now can never land and is
        deleted. It was read before the log was, so it cannot be newer.
        """
        before = set(self._known)
        self._read(skip=own.name if own else "")
        taken = set(own.transaction_ids) if own else set()
        found: list[PreparedBatch] = []
        items = 0
        for batch, _ in list(self._known.values()):
            if len(found) >= MAX_PIGGYBACKED:
                break
            if not _matches(batch, log):
                if batch.name in before:
                    self.remove([batch])
                continue
            try:
                self._check(batch, log)
            except AnnouncementError as error:
                self._reject(batch.name, str(error))
                continue
            except OSError as error:  # it says nothing about the announcement
                _LOG.info("a file of an announced batch is not seen: %s", first_line(error))
                continue
            ids, size = batch.transaction_ids, len(batch.files) + len(batch.claims)
            if taken.isdisjoint(ids) and items + size <= MAX_PIGGYBACKED_ITEMS:
                taken |= ids
                items += size
                found.append(batch)
        return tuple(found)

    def _check(self, batch: PreparedBatch, log: DeltaLog) -> None:
        """Raise `AnnouncementError` when a batch cannot land although it matches."""
        check_layout(batch, log.layout())
        for file in batch.files:
            size = self._storage.size(file.path)
            if size != file.size:
                raise AnnouncementError(f"a file has {size} bytes instead of {file.size}")

    def _read(self, skip: str) -> None:
        """Bring `_known` up to what is announced; `skip` is this writer's own."""
        listing = self._listing()
        if listing is None:
            self._known = {}
            return
        names = {stored.path for stored in listing}
        self._known = {name: one for name, one in self._known.items() if name in names}
        self._ignored &= names
        wanted = self._wanted(listing, skip)
        try:
            for path, found in self._storage.read_each(FOLDER, wanted, MAX_ANNOUNCEMENT_BYTES):
                self._take(path, found)
        except OSError as error:
            _LOG.info("the announcements could not be read: %s", first_line(error))

    def _wanted(self, listing: Iterable[StoredObject], skip: str) -> list[str]:
        """The names of the announcements to read now. What can be told from the listing alone is
        rejected here.
        """
        room = MAX_HELD_BYTES - sum(size for _, size in self._known.values())
        wanted: list[str] = []
        rejected = 0
        for stored in listing:
            if stored.path == skip or stored.path in self._known or stored.path in self._ignored:
                continue
            good = is_announcement(stored.path)
            fits = stored.size <= min(room, MAX_ANNOUNCEMENT_BYTES)
            if good and fits and len(wanted) < MAX_READ:
                room -= stored.size
                wanted.append(stored.path.removeprefix(f"{FOLDER}/"))
            elif rejected >= MAX_READ:
                continue
            elif not good:
                rejected += 1
                self._ignore(stored.path, "its name is not one of an announcement")
            elif stored.size > MAX_ANNOUNCEMENT_BYTES:
                rejected += 1
                self._reject(stored.path, f"it has more than {MAX_ANNOUNCEMENT_BYTES} bytes")
        return wanted

    def _take(self, path: str, found: bytes | OSError) -> None:
        """Keep an announcement that was read, or reject it."""
        try:
            if isinstance(found, OSError):
                raise found
            self._known[path] = decoded(found, path), len(found)
        except OtherFormatError as error:
            self._ignore(path, str(error))
        except (AnnouncementError, UnsafeObjectError) as error:
            self._reject(path, first_line(error))
        except OSError as error:  # landed and deleted since it was listed, or cannot be read now
            _LOG.debug("an announcement could not be read: %s", first_line(error))

    def _listing(self) -> list[StoredObject] | None:
        try:
            return self._storage.list(FOLDER, MAX_LISTED)
        except UnsafeObjectError as error:
            if FOLDER not in self._ignored:
                self._ignore(FOLDER, first_line(error))
        except OSError as error:
            _LOG.info("the announcements could not be listed: %s", first_line(error))
        return None

    def _delete(self, name: str) -> bool:
        self._known.pop(name, None)
        try:
            self._storage.delete(name)
        except OSError as error:
            _LOG.info("an announcement stays although it is settled: %s", first_line(error))
            return False
        return True

    def _reject(self, name: str, reason: str) -> None:
        if self._delete(name):
            self._events(AnnouncementRejected(bounded(name), reason, removed=True))
        else:
            self._ignore(name, reason)

    def _ignore(self, name: str, reason: str) -> None:
        self._ignored.add(name)
        self._events(AnnouncementRejected(bounded(name), reason, removed=False))


def _matches(batch: PreparedBatch, log: DeltaLog) -> bool:
    """Whether the table has exactly the metadata and the numbers that this batch expects."""
    return batch.layout == log.layout().digest and all(
        TxnVersions(log.transaction(claim.data_id), log.transaction(claim.fence_id))
        == claim.expected
        for claim in batch.claims
    )


def combined(batches: Sequence[PreparedBatch]) -> tuple[tuple[DataFile, ...], dict[str, int]]:
    """The files and the transactions of one commit that lands all these batches."""
    files = tuple(file for batch in batches for file in batch.files)
    return files, {
        key: number
        for batch in batches
        for claim in batch.claims
        for key, number in claim.transactions().items()
    }
