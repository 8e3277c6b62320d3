"""Announce prepared batches, so that other writers commit them together with their own.

See docs/decisions/0003-combined-commits.md. An announcement is a small JSON object: the files of a
batch, the id and form of the table, and per shard what the table must have and what it gets. Any
writer may commit it at any later time, also after its author died, if and only if the table has
**exactly** what is expected. The number of a shard never falls, so it is committed at most once,
and one that does not match any more can never be committed.

Every process that may write to the store can create an announcement, so it is parsed strictly and
with limits; the log checks its files (`Log.problem`). An announcement is **not authenticated**: a
process that may write to a table's folder may also write to its log. The checks prevent that a
defective or forged announcement makes the table unreadable or stops the commits of other workers.
An invalid one is removed, or ignored by this process if it cannot be removed, with an event.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from kcl_pipeline.batch import DataFile
from kcl_pipeline.errors import TableMismatchError
from kcl_pipeline.events import AnnouncementRejected, EventSink, ignore_events
from kcl_pipeline.position import Position, StoredPosition, check_entries
from kcl_pipeline.sinks.log import Head, Log, ObjectStore, StoredObject, UnsafeObjectError
from kcl_pipeline.text import printable

FOLDER: Final = "_kcl_pipeline/announced"
MAX_ANNOUNCEMENT_BYTES: Final = 1024 * 1024
"""Enough for about 300 files with 32 columns. A larger batch is committed by its writer alone."""
MAX_STATISTICS: Final = 64 * 1024
"""Characters of the statistics of a file."""
MAX_ENTRIES: Final = 2000
MAX_PIGGYBACKED: Final = 64
"""Batches of others in one commit."""
MAX_PIGGYBACKED_ITEMS: Final = 10_000
"""Files and shards of others in one commit."""
MAX_HELD_BYTES: Final = 16 * MAX_ANNOUNCEMENT_BYTES
"""Size of the announcements that one process keeps. More are read after these are committed."""
MAX_LISTED: Final = 10_000
MAX_READ: Final = 100
"""Announcements that one pass reads, or rejects unread. The next pass continues."""
MAX_LINE: Final = 500
_LOG: Final = logging.getLogger(__name__)

_NAME: Final = re.compile(rf"{FOLDER}/([0-9a-f]{{32}})\.json")
_MAX_LONG: Final = 2**63 - 1
_Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_LONG)]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class AnnouncementError(ValueError):
    """The object is not a valid announcement. The message does not quote its content."""


@dataclass(frozen=True, slots=True)
class AnnouncedBatch:
    """A batch that any writer may commit.

    Attributes:
        name: Object name of its announcement.
        form: The `Head.form` that the files were checked against.
        table_id: Id of the table that its positions were read from.
        files: Files that are written and not committed yet.
        expected: What the table must have of its shards. Their keys begin with the application.
        becomes: What the table has of them after the commit.
    """

    name: str
    form: str
    table_id: str
    files: tuple[DataFile, ...]
    expected: Mapping[str, StoredPosition]
    becomes: Mapping[str, StoredPosition]

    def fits(self, head: Head) -> bool:
        """Return whether the table is the expected one, with exactly the expected positions."""
        return self.table_id == head.table_id and all(
            head.stored(key) == stored for key, stored in self.expected.items()
        )


class _File(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    path: Annotated[str, msgspec.Meta(max_length=1024)]
    size: _Count
    rows: _Count
    partition_values: dict[str, str | None]
    modified_millis: _Count
    statistics: Annotated[str, msgspec.Meta(max_length=MAX_STATISTICS)]


class _Stored(msgspec.Struct, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    number: _Count
    sequence_number: Annotated[str, msgspec.Meta(pattern="^[0-9]{1,129}$")] | None = None
    sub: _Count = 0
    ended: bool = False


class _Entry(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    key: _Text
    expected: _Stored
    becomes: _Stored


class _Announcement(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    table_id: _Text
    form: Annotated[str, msgspec.Meta(max_length=128)]
    files: list[_File]
    entries: Annotated[list[_Entry], msgspec.Meta(min_length=1, max_length=MAX_ENTRIES)]


_DECODER: Final = msgspec.json.Decoder(_Announcement)


def is_announcement(name: str) -> bool:
    """Whether an object of this name can be an announcement. Other objects are never opened."""
    return _NAME.fullmatch(name) is not None


def share_of_names(name: str) -> float:
    """Return which part of all possible names of announcements is before this one, 0 to 1."""
    return int(name[len(FOLDER) + 1 : -5], 16) / 16**32


def encoded(batch: AnnouncedBatch) -> bytes:
    """Encode a batch as an announcement."""
    files = [
        _File(
            one.path,
            one.size,
            one.rows,
            dict(one.partition_values),
            one.modified_millis,
            one.statistics,
        )
        for one in batch.files
    ]
    entries = [
        _Entry(key, _values(expected), _values(batch.becomes[key]))
        for key, expected in batch.expected.items()
    ]
    return msgspec.json.encode(_Announcement(batch.table_id, batch.form, files, entries))


def decoded(data: bytes, name: str) -> AnnouncedBatch:
    """Decode and validate an announcement. Its files are checked by `Log.problem`.

    Raises:
        AnnouncementError: The announcement is invalid.
    """
    if not is_announcement(name):
        raise AnnouncementError("its name is not the name of an announcement")
    if len(data) > MAX_ANNOUNCEMENT_BYTES:
        raise AnnouncementError(f"it has more than {MAX_ANNOUNCEMENT_BYTES} bytes")
    try:
        content = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec's message names the field. It quotes no value, only names of unknown fields.
        raise AnnouncementError(f"it is malformed: {str(error)[:200]!r}") from error
    files = tuple(
        DataFile(
            one.path,
            one.size,
            one.rows,
            one.partition_values,
            one.modified_millis,
            one.statistics,
        )
        for one in content.files
    )
    expected = {one.key: _stored(one.expected) for one in content.entries}
    becomes = {one.key: _stored(one.becomes) for one in content.entries}
    if len({file.path for file in files}) != len(files):
        raise AnnouncementError("it names a file twice")
    if len(expected) != len(content.entries):
        raise AnnouncementError("it names a shard twice")
    try:
        check_entries(expected, becomes)
    except ValueError:  # whose message quotes the content
        raise AnnouncementError("a position does not follow the expected one") from None
    return AnnouncedBatch(name, content.form, content.table_id, files, expected, becomes)


def read_announcements(
    objects: ObjectStore, since_millis: int = 0
) -> Iterator[tuple[str, AnnouncedBatch | AnnouncementError | OSError]]:
    """Read the announcements of a table: yield the name of each with its batch, or why it has none.

    Args:
        objects: Has the announcements below `FOLDER`.
        since_millis: Only objects that were modified at this time or later.

    Raises:
        OSError: They cannot be listed.
    """
    listed = [one.path for one in objects.list(FOLDER) if one.modified_millis >= since_millis]
    names = [path.removeprefix(f"{FOLDER}/") for path in listed if is_announcement(path)]
    for path in listed:
        if not is_announcement(path):
            yield path, AnnouncementError("its name is not the name of an announcement")
    for path, data in objects.read_each(FOLDER, names, MAX_ANNOUNCEMENT_BYTES) if names else ():
        try:
            yield path, data if isinstance(data, OSError) else decoded(data, path)
        except AnnouncementError as error:
            yield path, error


def _values(stored: StoredPosition) -> _Stored:
    position = stored.position
    if position is None:
        return _Stored(stored.number, ended=stored.ended)
    number, sub = position.sequence_number, position.sub_sequence_number
    return _Stored(stored.number, number, sub, stored.ended)


def _stored(values: _Stored) -> StoredPosition:
    number = values.sequence_number
    position = None if number is None else Position(number, values.sub)
    return StoredPosition(values.number, position, values.ended)


class AnnouncementStore:
    """The announcements of one table.

    No failure here stops a commit: a batch that cannot be announced is committed by its writer
    alone, and an announcement that cannot be used is committed by its writer.

    Args:
        objects: Has the announcements below `FOLDER`.
        events: Receives rejected announcements.
    """

    def __init__(self, objects: ObjectStore, events: EventSink = ignore_events) -> None:
        self._objects = objects
        self._events = events
        self._listed: list[StoredObject] | None = None
        self._known: dict[str, tuple[AnnouncedBatch, int]] = {}
        self._ignored: set[str] = set()
        self._sound: set[str] = set()

    def announce(
        self,
        form: str,
        table_id: str,
        files: Sequence[DataFile],
        expected: Mapping[str, StoredPosition],
        becomes: Mapping[str, StoredPosition],
        log: Log,
    ) -> AnnouncedBatch | None:
        """Announce a batch to all writers (`AnnouncedBatch` has the arguments).

        Args:
            form: The `Head.form` that the files fit.
            table_id: Id of the table that the positions were read from.
            files: Its files.
            expected: What the table must have of its shards.
            becomes: What the table has of them afterwards.
            log: Names the batch.

        Returns:
            What was announced. None: that failed, and its writer commits it alone.
        """
        try:
            unique = log.batch_name(files)
            if unique is None:
                return None
            name = f"{FOLDER}/{unique}.json"
            batch = AnnouncedBatch(name, form, table_id, tuple(files), expected, becomes)
            data = encoded(batch)
            decoded(data, name)  # as other writers will do
            # One that a power failure destroys is rejected, and its writer commits the batch.
            with self._objects.create(name, durable=False) as stream:
                stream.write(data)
        except (OSError, AnnouncementError) as error:
            _LOG.warning("cannot announce a batch, committing it alone: %s", _line(error))
            return None
        return batch

    def remove(self, batches: Iterable[AnnouncedBatch]) -> None:
        """Delete announcements that are committed, or that can never be committed."""
        names = [batch.name for batch in batches]
        if names:
            self._delete(*names)

    def reject(self, names: Iterable[str], reason: str) -> None:
        """Remove announcements that cannot be used. This process never reads the others again."""
        for name in names:
            self._reject(name, reason)

    def before(self, name: str) -> int | None:
        """Return how many announcements are listed before this one. None: it is not listed.

        If there are none, the next call of `collect` uses this listing.
        """
        listed = self._listing() or []
        names = [stored.path for stored in listed]
        if name not in names:
            return None
        turn = sum(one < name and one not in self._ignored for one in names)
        self._listed = None if turn else listed
        return turn

    def collect(self, skip: str, head: Head | None, log: Log) -> None:
        """Read the announcements that are new, and check their files, for `piggybacked`.

        Call it before the log is read for an attempt, because it takes time in which other writers
        may commit.

        Args:
            skip: Name of the announcement of this writer.
            head: A state of the table. What was announced for another form is checked later.
            log: Checks the files.
        """
        self._read(skip)
        fitting = [
            batch
            for batch, _ in self._known.values()
            if head is not None and _is_for(batch, head) and batch.name not in self._sound
        ]
        self._check(fitting[:MAX_PIGGYBACKED], log)

    def piggybacked(self, head: Head, keys: Iterable[str]) -> tuple[AnnouncedBatch, ...]:
        """Announced batches that can be committed after `head` together with these shards.

        Their expected positions match exactly, no shard occurs twice, and their files exist. One
        that was collected and does not match can never be committed, and is deleted: it was read
        before the log, so it cannot be newer.
        """
        taken, items = set(keys), 0
        chosen: list[AnnouncedBatch] = []
        finished: list[AnnouncedBatch] = []
        for batch, _ in self._known.values():
            if not _matches(batch, head):
                finished.append(batch)
                continue
            size = len(batch.files) + len(batch.expected)
            if (
                batch.name in self._sound
                and len(chosen) < MAX_PIGGYBACKED
                and taken.isdisjoint(batch.expected)
                and items + size <= MAX_PIGGYBACKED_ITEMS
            ):
                taken.update(batch.expected)
                items += size
                chosen.append(batch)
        self.remove(finished)
        return tuple(chosen)

    def _check(self, batches: Sequence[AnnouncedBatch], log: Log) -> None:
        """Note which batches have files that exist and fit. An announcement is checked once.

        Its files stay as long as it is listed: vacuum deletes the announcement first.
        """

        def problem(batch: AnnouncedBatch) -> str | OSError | None:
            try:
                return log.problem(batch.name[len(FOLDER) + 1 : -5], batch.files)
            except OSError as error:  # does not mean that the announcement is invalid
                return error

        problems: Sequence[str | OSError | None] = self._objects.map(problem, batches)
        for batch, found in zip(batches, problems, strict=True):
            if isinstance(found, OSError):
                _LOG.info("cannot read a file of an announced batch: %s", _line(found))
            elif found is not None:
                self._reject(batch.name, found)
            else:
                self._sound.add(batch.name)

    def _read(self, skip: str) -> None:
        """Update `_known` to the announced batches; `skip` is this writer's own."""
        listing, self._listed = self._listed or self._listing(), None
        if listing is None:
            self._known = {}
            return
        names = {stored.path for stored in listing}
        self._known = {name: one for name, one in self._known.items() if name in names}
        self._ignored &= names
        self._sound &= names
        names_to_read = self._select(listing, skip)
        try:
            for path, found in self._objects.read_each(
                FOLDER, names_to_read, MAX_ANNOUNCEMENT_BYTES
            ):
                self._add(path, found)
        except OSError as error:
            _LOG.info("cannot read the announcements: %s", _line(error))

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

    def _add(self, path: str, content: bytes | OSError) -> None:
        """Keep an announcement that was read, or reject it."""
        try:
            if isinstance(content, OSError):
                raise content
            self._known[path] = decoded(content, path), len(content)
        except (AnnouncementError, UnsafeObjectError) as error:
            self._reject(path, _line(error))
        except OSError as error:  # deleted since it was listed, or cannot be read now
            _LOG.debug("cannot read an announcement: %s", _line(error))

    def _listing(self) -> list[StoredObject] | None:
        try:
            return self._objects.list(FOLDER, MAX_LISTED)
        except UnsafeObjectError as error:
            if FOLDER not in self._ignored:
                self._ignore(FOLDER, _line(error))
        except OSError as error:
            _LOG.info("cannot list the announcements: %s", _line(error))
        return None

    def _delete(self, *names: str) -> bool:
        for name in names:
            self._known.pop(name, None)
        try:
            self._objects.delete(*names)
        except OSError as error:
            _LOG.info("cannot delete a finished announcement: %s", _line(error))
            return False
        return True

    def _reject(self, name: str, reason: str) -> None:
        if self._delete(name):
            self._events(AnnouncementRejected(printable(name, MAX_LINE), reason, removed=True))
        else:
            self._ignore(name, reason)

    def _ignore(self, name: str, reason: str) -> None:
        self._ignored.add(name)
        self._events(AnnouncementRejected(printable(name, MAX_LINE), reason, removed=False))


def _is_for(batch: AnnouncedBatch, head: Head) -> bool:
    return batch.table_id == head.table_id and batch.form == head.form


def _matches(batch: AnnouncedBatch, head: Head) -> bool:
    try:
        return _is_for(batch, head) and batch.fits(head)
    except TableMismatchError:  # a position that another program changed
        return False


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return printable(lines[0], MAX_LINE) if lines else type(error).__name__
