"""Encode announcements of prepared batches, and validate those of other workers.

An announcement is one JSON object below `FOLDER` in the table's folder. Every process that may
write to this folder can create one, so it is parsed strictly and with limits:

* exactly the fields of `_Announcement`, integers in the range of a Delta transaction version;
* at most `MAX_ANNOUNCEMENT_BYTES` and `MAX_CLAIMS`;
* files only in the announcer's own folder. The unique part of that folder's name is the name of
  the announcement, so an announcement cannot name a file of another one. The form of a path is a
  whitelist: no `..`, no absolute path, no URL, nothing in `_delta_log`;
* partition columns and values that fit the table (`layout.TableLayout`).

`combined_commits` then compares the sizes with the files. An announcement is **not
authenticated**: a process that may write to the table's folder may also write to its log. The
checks prevent that a defective or forged announcement makes the table unreadable or stops the
commits of other workers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated, Final

import msgspec

from kcl_pipeline.batch import CommitEntry, DataFile, TxnVersions, names_of
from kcl_pipeline.delta.commits import names, positions
from kcl_pipeline.delta.files import unique_name
from kcl_pipeline.delta.layout import TableLayout
from kcl_pipeline.delta.log.entries import MAX_NUMBER, MIN_NUMBER

FOLDER: Final = "_kcl_pipeline/announced"
FORMAT: Final = 4
FORMAT_OF_LONG_NAMES: Final = 3
"""Announcements without short names, which older versions of this package commit, too.

Of short names they know neither the position nor the form, so they must not see the others.
"""
MAX_ANNOUNCEMENT_BYTES: Final = 1024 * 1024
"""Enough for about 5,000 files. A larger batch is committed by its owner alone."""
MAX_CLAIMS: Final = 1000
MAX_PATH: Final = 1024
"""Characters; S3 keys have at most 1,024 bytes."""

_NAME: Final = re.compile(rf"{FOLDER}/([0-9a-f]{{32}})\.json")
_PATH: Final = re.compile(
    r"batches/[A-Za-z0-9][A-Za-z0-9.-]{0,79}-(?P<unique>[0-9a-f]{32})"  # `files.batch_folder`
    r"(/[0-9a-f]{32})?"  # of a task
    r"(/[^/\\=\x00-\x1f\x7f]+=[^/\\\x00-\x1f\x7f]*)*"  # partition values, as Spark writes them
    r"/[A-Za-z0-9][A-Za-z0-9._-]*\.parquet"
)

_Number = Annotated[int, msgspec.Meta(ge=MIN_NUMBER, le=MAX_NUMBER)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
"""An application name and a DynamoDB key (2,048 bytes), or the name of a shard."""
_Position = Annotated[
    list[_Number], msgspec.Meta(min_length=len(names.SHORT), max_length=len(names.LONG))
]


class AnnouncementError(ValueError):
    """The object is not a valid announcement. The message does not quote its content."""


class OtherFormatError(AnnouncementError):
    """The announcement was written by another version of this package. It is ignored."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One lease of a batch.

    Attributes:
        data_id: The application transaction of its data number.
        fence_id: The application transaction of its fence.
        number: The number that the batch sets.
        expected: The versions that the table must have.
        position_id: The `long_id` of its position. None: the table stores no position.
        sets: What the commit stores if the table stores positions. None: the data number alone.
        is_short: Whether its position has short names.
    """

    data_id: str
    fence_id: str
    number: int
    expected: TxnVersions
    position_id: str | None = None
    sets: TxnVersions | None = None
    is_short: bool = False

    @classmethod
    def of(
        cls,
        entry: CommitEntry,
        application: str,
        transaction: names.Transaction,
        *,
        prefer_short: bool,
    ) -> Claim:
        """Return the claim of a lease of a commit, with the names that its position has.

        Args:
            entry: The lease.
            application: The application.
            transaction: Returns the version of an application transaction in the table.
            prefer_short: Whether a shard without a position gets short names.
        """
        lease_key, shard_name = names_of(entry.lease_key)
        data_id = f"{application}/{lease_key}"
        own = (data_id, f"{data_id}/fence", entry.number, entry.expected)
        if shard_name is None:
            return cls(*own, None, entry.sets)
        long = names.long_id(application, shard_name)
        is_short = names.has_short_names(transaction, long, preferred=prefer_short)
        return cls(*own, long, entry.sets, is_short)

    def versions(self, transaction: names.Transaction) -> TxnVersions:
        """Read the present versions of this lease by the versions of transactions."""
        return positions.versions_of(
            transaction, self.data_id, self.fence_id, self.position_id, short=self.is_short
        )

    def required(self) -> dict[str, int]:
        """The transactions that show that this claim was committed."""
        if self.position_id is None or self.sets is None:
            return {self.data_id: self.number}
        return positions.named(self.position_id, self.sets, short=self.is_short)

    def before(self) -> dict[str, int | None]:
        """The version of the transaction that changes with every commit of this lease."""
        if self.position_id is None or self.sets is None:
            return {self.data_id: self.expected.data}
        first = None
        if self.expected.number is not None:
            first = positions.encoded(self.expected, short=self.is_short)[0]
        return {names.names(self.position_id, short=self.is_short)[0]: first}

    def transactions(self) -> dict[str, int]:
        """The transactions that the commit sets for this lease.

        Without a position, the fence is set to its present version, so that the conflict check of
        any Delta client covers both transactions. The first commit with a position raises it, and
        writes the marker of short names.
        """
        fence = self.expected.fence if self.sets is None else self.sets.fence
        is_set = fence is not None and (self.sets is None or fence != self.expected.fence)
        found = {**self.required(), **({self.fence_id: fence or 0} if is_set else {})}
        is_first = self.sets is not None and self.expected.number is None
        if self.position_id is not None and self.is_short and is_first:
            found[names.marker_name(self.position_id)] = names.MARKER
        return found


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch that is ready to be committed.

    Attributes:
        files: Files that are written and not committed yet.
        claims: Its leases.
        layout: Digest of the table metadata that the files were checked against.
        name: Object name of its announcement; empty while it is not announced.
    """

    files: tuple[DataFile, ...]
    claims: tuple[Claim, ...]
    layout: str = ""
    name: str = ""

    @property
    def transaction_ids(self) -> frozenset[str]:
        """What no other batch of the same commit may name: the transactions of every lease."""
        return frozenset(
            id_
            for one in self.claims
            for id_ in (one.data_id, one.fence_id, one.position_id)
            if id_ is not None
        )


class _File(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    path: Annotated[str, msgspec.Meta(max_length=MAX_PATH)]
    size: _Count
    rows: _Count
    partition_values: dict[str, str | None]
    modified_millis: _Count


class _Claim(msgspec.Struct, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    data_id: _Id
    fence_id: _Id
    number: _Number
    expected_data: _Number | None
    expected_fence: _Number | None
    position_id: _Id | None = None
    expected_position: _Position | None = None
    position: _Position | None = None
    is_short: bool = False


class _Announcement(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    format: int
    layout: Annotated[str, msgspec.Meta(max_length=128)]
    files: list[_File]
    claims: Annotated[list[_Claim], msgspec.Meta(min_length=1, max_length=MAX_CLAIMS)]


class _Header(msgspec.Struct):
    format: int


_HEADER: Final = msgspec.json.Decoder(_Header)
_DECODER: Final = msgspec.json.Decoder(_Announcement)


def is_announcement(name: str) -> bool:
    """Whether an object of this name can be an announcement. Other objects are never opened."""
    return _NAME.fullmatch(name) is not None


def announcement_name(batch: PreparedBatch) -> str:
    """Object name of this batch's announcement.

    Raises:
        AnnouncementError: The files are not all in one folder of their own.
    """
    folders = {_folder_of(file.path) for file in batch.files}
    if len(folders) > 1:
        raise AnnouncementError("its files are in several folders")
    return f"{FOLDER}/{folders.pop() if folders else unique_name()}.json"


def encoded(batch: PreparedBatch) -> bytes:
    """Encode a batch as an announcement."""
    files = [
        _File(one.path, one.size, one.rows, dict(one.partition_values), one.modified_millis)
        for one in batch.files
    ]
    claims = [_encoded_claim(one) for one in batch.claims]
    is_short = any(one.is_short for one in batch.claims)
    number = FORMAT if is_short else FORMAT_OF_LONG_NAMES
    return msgspec.json.encode(_Announcement(number, batch.layout, files, claims))


def decoded(data: bytes, name: str) -> PreparedBatch:
    """Decode and validate an announcement.

    Raises:
        AnnouncementError: The announcement is invalid.
        OtherFormatError: Another version of this package wrote it.
    """
    if len(data) > MAX_ANNOUNCEMENT_BYTES:
        raise AnnouncementError(f"it has more than {MAX_ANNOUNCEMENT_BYTES} bytes")
    try:
        if _HEADER.decode(data).format not in (FORMAT, FORMAT_OF_LONG_NAMES):
            raise OtherFormatError(f"its format is not {FORMAT}")
        content = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec's message names the field. It quotes no value, only names of unknown fields.
        raise AnnouncementError(f"it is malformed: {str(error)[:200]!r}") from error
    files = tuple(
        DataFile(one.path, one.size, one.rows, one.partition_values, one.modified_millis)
        for one in content.files
    )
    try:
        claims = tuple(_decoded_claim(one) for one in content.claims)
    except ValueError as error:
        raise AnnouncementError("a position is outside its limits") from error
    batch = PreparedBatch(files, claims, content.layout, name)
    _check_files(batch)
    _check_claims(batch)
    if content.format != FORMAT and any(one.is_short for one in claims):
        raise AnnouncementError("its format has no short names")
    return batch


def _encoded_claim(one: Claim) -> _Claim:
    def numbers(versions: TxnVersions | None) -> list[int] | None:
        if versions is None or versions.number is None:
            return None
        return list(positions.encoded(versions, short=one.is_short))

    return _Claim(
        one.data_id,
        one.fence_id,
        one.number,
        one.expected.data,
        one.expected.fence,
        one.position_id,
        numbers(one.expected),
        numbers(one.sets),
        one.is_short,
    )


def _decoded_claim(one: _Claim) -> Claim:
    data, fence, short = one.expected_data, one.expected_fence, one.is_short
    before = None if one.expected_position is None else tuple(one.expected_position)
    expected = positions.decoded(data, fence, before, short=short)
    sets = None
    if one.position is not None:
        sets = positions.decoded(data, fence, tuple(one.position), short=short)
        sets = replace(sets, fence=expected.moved_to(sets.position, ended=False).fence)
    return Claim(one.data_id, one.fence_id, one.number, expected, one.position_id, sets, short)


def check_layout(batch: PreparedBatch, layout: TableLayout) -> None:
    """Check the partition values against the table.

    Raises:
        AnnouncementError: A partition value does not fit the table.
    """
    for file in batch.files:
        reason = layout.problem(file.partition_values)
        if reason is not None:
            raise AnnouncementError(reason)


def _folder_of(path: str) -> str:
    """The unique part of the folder's name that a file is in."""
    match = _PATH.fullmatch(path)
    if match is None:
        raise AnnouncementError("a path is not the path of a batch file")
    return match["unique"]


def _check_files(batch: PreparedBatch) -> None:
    match = _NAME.fullmatch(batch.name)
    if match is None:
        raise AnnouncementError("its name is not the name of an announcement")
    if any(_folder_of(file.path) != match[1] for file in batch.files):
        raise AnnouncementError("a file is not in the announcer's own folder")
    if len({file.path for file in batch.files}) != len(batch.files):
        raise AnnouncementError("it names a file twice")


def _check_claims(batch: PreparedBatch) -> None:
    if any(one.fence_id != f"{one.data_id}/fence" for one in batch.claims):
        raise AnnouncementError("a fence does not belong to its lease")
    with_position = [one for one in batch.claims if one.position_id is not None]
    if len(batch.transaction_ids) != 2 * len(batch.claims) + len(with_position):
        raise AnnouncementError("it names a lease twice")
    if any(one.number == one.expected.data for one in batch.claims if one.sets is None):
        raise AnnouncementError("a new number equals the expected number")
    for one in batch.claims:
        is_position = one.sets is not None or one.expected.number is not None or one.is_short
        if is_position and one.position_id is None:
            raise AnnouncementError("a position belongs to no shard")
    if any(
        one.sets != one.expected.moved_to(one.sets.position, ended=False)
        or one.number != one.sets.number
        for one in batch.claims
        if one.sets is not None
    ):
        raise AnnouncementError("a position does not follow the expected one")
