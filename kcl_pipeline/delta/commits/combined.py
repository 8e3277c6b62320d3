"""Commit the announced batches of several writers together.

See docs/decisions/0003-combined-commits.md. An announcement is a small object next to the Delta
log: the files of a prepared batch and, per lease, its number and the two expected transaction
versions (`announcements`). Any writer may commit it at any later time, also after its owner died,
if and only if the table has **exactly** the expected versions. It is therefore committed at most
once. The versions of a lease never return to an earlier pair, so an announcement that does not
match any more can never be committed. A writer that loses the race for a version loses little: the
winner has usually committed its batch too.

Announcements of others are validated before they are used (see `announcements`). An invalid one is
removed, or ignored by this process if it cannot be removed, and produces an event. It never fails
the commit of another worker.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from kcl_pipeline.batch import DataFile
from kcl_pipeline.clock import Clock
from kcl_pipeline.delta.commits.announcements import (
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
from kcl_pipeline.errors import TableMismatchError
from kcl_pipeline.events import AnnouncementRejected, EventSink, ignore_events

MAX_PIGGYBACKED: Final = 64
"""Batches of others in one commit."""
MAX_PIGGYBACKED_ITEMS: Final = 10_000
"""Files and leases of others in one commit."""
MAX_HELD_BYTES: Final = 16 * MAX_ANNOUNCEMENT_BYTES
"""Size of the announcements that one process keeps. More are read after these are committed."""
MAX_LISTED: Final = 10_000
MAX_READ: Final = 100
"""Announcements that one pass reads, or rejects unread. The next pass continues."""
_CROWDED: Final = 1.2
_POLL_SECONDS: Final = 0.004
_LONGEST_ATTEMPT_SECONDS: Final = 0.5
_LOG: Final = logging.getLogger(__name__)


class Pace:
    """Estimate the contention on the log, and how long to wait before an attempt.

    The waiting time is chosen so that about one of the waiting writers makes an attempt at a time.
    """

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._batches_per_commit = 1.0
        self._attempt_seconds = 2 * _POLL_SECONDS

    @property
    def contended(self) -> bool:
        """Whether other writers recently committed between this writer's commits."""
        return self._batches_per_commit > _CROWDED

    def lost(self, batches: int) -> None:
        """Note that another writer took the version while this many batches were waiting."""
        self._batches_per_commit = max(self._batches_per_commit, 2.0, float(batches))

    def landed(self, batches: float) -> None:
        """Note a successful commit with this many batches."""
        self._batches_per_commit += (max(batches, 1.0) - self._batches_per_commit) / 4

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Measure one attempt.

        The estimate follows the shortest attempts. Longer ones reflect the load of this machine,
        and waiting for that load would increase it.
        """
        began = self._clock.monotonic()
        yield
        seconds = min(max(self._clock.monotonic() - began, _POLL_SECONDS), _LONGEST_ATTEMPT_SECONDS)
        self._attempt_seconds = min(
            seconds, self._attempt_seconds + (seconds - self._attempt_seconds) / 32
        )

    def polls(self) -> Iterator[None]:
        """Wait in short steps. The caller polls the log after each step and then makes an attempt.

        Ends after a random time.
        """
        wait_seconds = self._rng.uniform(0, 2 * self._batches_per_commit * self._attempt_seconds)
        pause = max(self._attempt_seconds / 2, _POLL_SECONDS)
        for _ in range(math.ceil(wait_seconds / pause)):
            self._clock.sleep(pause)
            yield


class AnnouncementStore:
    """The announcements of one table.

    No failure here stops a commit: a batch that cannot be announced is committed by its owner
    alone, and an announcement that cannot be used is committed by its owner.
    """

    def __init__(self, storage: Storage, events: EventSink = ignore_events) -> None:
        self._storage = storage
        self._events = events
        self._known: dict[str, tuple[PreparedBatch, int]] = {}
        self._ignored: set[str] = set()

    def announce(self, batch: PreparedBatch, log: DeltaLog) -> PreparedBatch:
        """Announce the batch to all writers.

        Returns:
            The batch with the name of its announcement; unchanged if that failed.
        """
        try:
            named = replace(batch, layout=log.layout.digest, name=announcement_name(batch))
            data = encoded(named)
            check_layout(decoded(data, named.name), log.layout)  # as other writers will do
            with self._storage.create(named.name) as stream:
                stream.write(data)
        except (OSError, AnnouncementError) as error:
            _LOG.warning("cannot announce a batch, committing it alone: %s", first_line(error))
            return batch
        return named

    def remove(self, batches: Iterable[PreparedBatch]) -> None:
        """Delete announcements that are committed, or that can never be committed."""
        for batch in batches:
            if batch.name:
                self._delete(batch.name)

    def reject(self, names: Iterable[str], reason: str) -> None:
        """Remove announcements that cannot be used. This process never reads the others again."""
        for name in names:
            self._reject(name, reason)

    def piggybacked(
        self, log: DeltaLog, own: PreparedBatch | None = None
    ) -> tuple[PreparedBatch, ...]:
        """Announced batches that can be committed on the log's version together with `own`.

        Their expected versions match exactly, no lease occurs twice, and their files exist. An
        announcement that was read before the previous call and does not match now can never be
        committed, and is deleted: it was read before the log, so it cannot be newer.
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
            except OSError as error:  # does not mean that the announcement is invalid
                _LOG.info("cannot read a file of an announced batch: %s", first_line(error))
                continue
            ids, size = batch.transaction_ids, len(batch.files) + len(batch.claims)
            if taken.isdisjoint(ids) and items + size <= MAX_PIGGYBACKED_ITEMS:
                taken |= ids
                items += size
                found.append(batch)
        return tuple(found)

    def _check(self, batch: PreparedBatch, log: DeltaLog) -> None:
        """Raise `AnnouncementError` if a matching batch does not fit the table or its files."""
        check_layout(batch, log.layout)
        for file in batch.files:
            size = self._storage.size(file.path)
            if size != file.size:
                raise AnnouncementError(f"a file has {size} bytes instead of {file.size}")

    def _read(self, skip: str) -> None:
        """Update `_known` to the announced batches; `skip` is this writer's own."""
        listing = self._listing()
        if listing is None:
            self._known = {}
            return
        names = {stored.path for stored in listing}
        self._known = {name: one for name, one in self._known.items() if name in names}
        self._ignored &= names
        names_to_read = self._select(listing, skip)
        try:
            for path, found in self._storage.read_each(
                FOLDER, names_to_read, MAX_ANNOUNCEMENT_BYTES
            ):
                self._add(path, found)
        except OSError as error:
            _LOG.info("cannot read the announcements: %s", first_line(error))

    def _select(self, listing: Iterable[StoredObject], skip: str) -> list[str]:
        """Names of the announcements to read now. Invalid names and sizes are rejected."""
        free_bytes = MAX_HELD_BYTES - sum(size for _, size in self._known.values())
        selected: list[str] = []
        rejected = 0
        for stored in listing:
            if stored.path == skip or stored.path in self._known or stored.path in self._ignored:
                continue
            is_valid_name = is_announcement(stored.path)
            fits = stored.size <= min(free_bytes, MAX_ANNOUNCEMENT_BYTES)
            if is_valid_name and fits and len(selected) < MAX_READ:
                free_bytes -= stored.size
                selected.append(stored.path.removeprefix(f"{FOLDER}/"))
            elif rejected >= MAX_READ:
                continue
            elif not is_valid_name:
                rejected += 1
                self._ignore(stored.path, "its name is not the name of an announcement")
            elif stored.size > MAX_ANNOUNCEMENT_BYTES:
                rejected += 1
                self._reject(stored.path, f"it has more than {MAX_ANNOUNCEMENT_BYTES} bytes")
        return selected

    def _add(self, path: str, found: bytes | OSError) -> None:
        """Keep an announcement that was read, or reject it."""
        try:
            if isinstance(found, OSError):
                raise found
            self._known[path] = decoded(found, path), len(found)
        except OtherFormatError as error:
            self._ignore(path, str(error))
        except (AnnouncementError, UnsafeObjectError) as error:
            self._reject(path, first_line(error))
        except OSError as error:  # deleted since it was listed, or cannot be read now
            _LOG.debug("cannot read an announcement: %s", first_line(error))

    def _listing(self) -> list[StoredObject] | None:
        try:
            return self._storage.list(FOLDER, MAX_LISTED)
        except UnsafeObjectError as error:
            if FOLDER not in self._ignored:
                self._ignore(FOLDER, first_line(error))
        except OSError as error:
            _LOG.info("cannot list the announcements: %s", first_line(error))
        return None

    def _delete(self, name: str) -> bool:
        self._known.pop(name, None)
        try:
            self._storage.delete(name)
        except OSError as error:
            _LOG.info("cannot delete a finished announcement: %s", first_line(error))
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
    """Whether the table has exactly the metadata and the versions that this batch expects."""
    try:
        return batch.layout == log.layout.digest and all(
            claim.versions(log.transaction) == claim.expected for claim in batch.claims
        )
    except TableMismatchError:  # a position that another program changed
        return False


def combined(batches: Sequence[PreparedBatch]) -> tuple[tuple[DataFile, ...], dict[str, int]]:
    """The files and the transactions of one commit with all these batches."""
    files = tuple(file for batch in batches for file in batch.files)
    return files, {
        key: number
        for batch in batches
        for claim in batch.claims
        for key, number in claim.transactions().items()
    }
