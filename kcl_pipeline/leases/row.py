"""The lease row: its values, and how they are stored (protocol §1.2, appendix A).

The codec comes first. It is the one of all rows: it reads attributes strictly and within limits,
and writes them. A class of rows declares in the annotations of its fields how they are stored
(`Attribute`), and `RowCodec` converts both ways.

Any client with access to the tables may have written a row. So type, length, range, count and
characters of every attribute that is used are checked here. A violation is a `ValueError` whose
message names the attribute; `readable` turns it into the `UnreadableRowError` of the row.
Attributes that this package does not know are ignored.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from types import TracebackType
from typing import Annotated, Any, Final, Generic, Self, TypeVar, get_type_hints

import msgspec

from kcl_pipeline.errors import UnreadableRowError
from kcl_pipeline.events import EventSink, RowRejected
from kcl_pipeline.leases.store import AttributeValue, Item
from kcl_pipeline.position import Position
from kcl_pipeline.shards import HashKeyRange
from kcl_pipeline.text import printable

MAX_LONG: Final = 2**63 - 1
"""Java's `long`, in which KCL stores all numbers, and Delta the versions of transactions."""

MAX_COUNTER: Final = 2**62
"""Largest lease counter and number of owner switches (our own limit).

Half of `MAX_LONG`: a counter that is read can always be incremented, and the number of a batch
always fits into the Delta log. A counter that starts at 0 reaches it after more than 100 million
years of a thousand writes per second.
"""

MAX_NUMBER_CHARACTERS: Final = 200
"""Longest N attribute. DynamoDB has 38 digits and exponents of -130 to 125, which are 168
characters without an exponent.
"""

MAX_NUMBER_EXPONENT: Final = 126
"""Largest number of decimal digits before the point of an N attribute (DynamoDB: below 1E+126)."""

MAX_ROW_BYTES: Final = 380_000
"""Largest lease row, with attributes of other writers (our own limit).

DynamoDB allows 400 KB (409,600 bytes). The difference is for the attributes that this package
writes. Without it, a full row could not be assigned, renewed or committed.
"""

MAX_KEY_BYTES: Final = 2048
"""Longest partition key (DynamoDB): lease key, worker id, and owner (the hash key of an index)."""

MAX_MILLIS: Final = 253_402_300_799_999
"""The end of the year 9999 in epoch milliseconds, the last one that Python can show."""

MAX_NAME_CHARACTERS: Final = 256
"""Longest other name, such as a run id or a lock version (our own limit)."""

SHARD_ID_FORM: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""Kinesis: the pattern of ShardId."""

MAX_RELATED_SHARDS: Final = 16
"""Largest number of parents or children of a shard (our own limit).

Kinesis has two of each. KCL only adds children to a row, so more than two are not an error.
"""

_WHOLE: Final = re.compile(r"[0-9]{1,38}")
_PLAIN: Final = frozenset({"S", "N", "B"})
_NO_SIZE: Final = frozenset({"BOOL", "NULL"})
_T = TypeVar("_T")
_C = TypeVar("_C", list[Any], dict[str, Any])
_UNREADABLE: Final = (
    ValueError,
    ArithmeticError,
    TypeError,
    AttributeError,
    LookupError,
    RecursionError,
)


def check_size(item: Item) -> None:
    """Raise `ValueError` for a row of more than `MAX_ROW_BYTES`.

    The size is counted as in DynamoDB: names, values, and a byte per element of a list or map.
    """
    characters = 0
    for attribute in item.values():
        for kind, value in attribute.items():
            if kind in _PLAIN:
                characters += len(value)
            elif kind not in _NO_SIZE:
                characters += len(str(value))
    # a character has at most four bytes, so nearly all rows need no exact count
    if characters > MAX_ROW_BYTES // 4:
        _check_bytes(item)


def _check_bytes(item: Item) -> None:
    size = 0
    parts: list[Any] = [item]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            size += sum(map(len, part))
            parts.extend(part.values())
        elif isinstance(part, list):
            size += len(part)
            parts.extend(part)
        elif isinstance(part, str):
            size += len(part) if part.isascii() else len(part.encode(errors="surrogatepass"))
        elif isinstance(part, bytes):
            size += len(part)
    if size > MAX_ROW_BYTES:
        raise ValueError(f"it has {size} bytes, more than {MAX_ROW_BYTES}")


class _Readable:
    """See `readable`. A class, because a generator per row is measurably slower."""

    __slots__ = ("_problem",)

    def __init__(self, problem: str | Callable[[], str]) -> None:
        self._problem = problem

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, _UNREADABLE):
            return
        problem = self._problem if isinstance(self._problem, str) else self._problem()
        raise UnreadableRowError(f"{problem}: {error}") from error


def readable(problem: str | Callable[[], str]) -> AbstractContextManager[None]:
    """Turn errors that the values of a row cause into an `UnreadableRowError`.

    Args:
        problem: Start of the message, or a function that returns it.
    """
    return _Readable(problem)


def required(value: Any, name: str) -> Any:
    """Return the value. Raise `ValueError` if it is None."""
    if value is None:
        raise ValueError(f"{name} is missing, or has another type")
    return value


def text_of(item: Item, name: str) -> str | None:
    """Return an S attribute; None if it is absent, empty or of another type."""
    value = _value(item, name, "S")
    return value if isinstance(value, str) and value else None


def name_of(item: Item, name: str, most_bytes: int = MAX_NAME_CHARACTERS) -> str | None:
    """Return an S attribute that is a name; None if it is absent, empty or of another type.

    Raises:
        ValueError: It has more than `most_bytes` bytes, or unprintable characters.
    """
    value = text_of(item, name)
    return None if value is None else checked_name(value, name, most_bytes)


def checked_name(value: str, name: str, most_bytes: int = MAX_NAME_CHARACTERS) -> str:
    """Return the value if it is a name. Raises as `name_of`, with `name` in the message."""
    if not value.isprintable():
        raise ValueError(f"{name} is '{printable(value)}', with characters that do not print")
    if len(value.encode()) > most_bytes:
        raise ValueError(f"{name} is '{printable(value)}', longer than {most_bytes} bytes")
    return value


def int_of(item: Item, name: str, *, most: int = MAX_LONG) -> int | None:
    """Return an N attribute as an integer; None if it is absent or of another type.

    Raises:
        ValueError: It is not a whole number from 0 to `most` (inclusive).
    """
    value = _value(item, name, "N")
    if not isinstance(value, str):
        return None
    if _WHOLE.fullmatch(value):
        number = int(value)
    else:
        exact = _decimal(value, name)
        if exact != exact.to_integral_value():
            raise ValueError(f"{name} is {printable(value, 50)}, not a whole number")
        number = int(exact)
    if not 0 <= number <= most:
        raise ValueError(f"{name} is {printable(value, 50)}, not from 0 to {most}")
    return number


def float_of(item: Item, name: str, *, least: float, most: float) -> float | None:
    """Return an N attribute as a float; None if it is absent or of another type.

    Raises:
        ValueError: It is not a number from `least` to `most` (inclusive).
    """
    value = _value(item, name, "N")
    if not isinstance(value, str):
        return None
    number = float(_decimal(value, name))
    if not least <= number <= most:
        raise ValueError(f"{name} is {printable(value, 50)}, not from {least:g} to {most:g}")
    return number


def _decimal(value: str, name: str) -> Decimal:
    # Only exponents of DynamoDB: `int` of a larger number could need all memory.
    if len(value) <= MAX_NUMBER_CHARACTERS and value.isascii() and "_" not in value:
        try:
            exact = Decimal(value)
        except InvalidOperation:
            exact = Decimal("NaN")
        if exact.is_finite() and (not exact or exact.adjusted() < MAX_NUMBER_EXPONENT):
            return exact
    raise ValueError(f"{name} is '{printable(value, 50)}', not a number of DynamoDB")


def checked_shard_id(value: object, name: str) -> str:
    """Return the value if it is a shard id. Otherwise raise `ValueError` with `name`."""
    if isinstance(value, str) and SHARD_ID_FORM.fullmatch(value):
        return value
    raise ValueError(f"{name} has '{printable(str(value), 50)}', which is not a shard id")


def map_of(item: Item, name: str, most: int) -> dict[str, Any]:
    """Return an M attribute; empty if it is absent or of another type.

    Raises:
        ValueError: It has more than `most` names.
    """
    return _bounded(item, name, "M", dict, most, "names")


def list_of(item: Item, name: str, most: int) -> list[Any]:
    """Return an L attribute; empty if it is absent or of another type.

    Raises:
        ValueError: It has more than `most` values.
    """
    return _bounded(item, name, "L", list, most, "values")


def _bounded(item: Item, name: str, tag: str, kind: type[_C], most: int, what: str) -> _C:
    value = _value(item, name, tag)
    if not isinstance(value, kind):
        return kind()
    if len(value) > most:
        raise ValueError(f"{name} has {len(value)} {what}, more than {most}")
    return value


def _value(item: Item, name: str, kind: str) -> Any:
    attribute: Any = item.get(name)
    return attribute.get(kind) if isinstance(attribute, dict) else None


LEADER_KEY: Final = "Leader"
MIGRATION_KEY: Final = "Migration3.0"
TABLE_MIGRATION_KEY: Final = "TableMigration3.5"
COORDINATOR_KEYS: Final = (LEADER_KEY, TABLE_MIGRATION_KEY, MIGRATION_KEY)
"""All of them. The last one has the pause, so it is deleted last."""

_MICRO: Final = Decimal("0.000001")


def string(value: str) -> AttributeValue:
    """Return an S attribute. Raise `ValueError` for an empty string, which KCL does not use."""
    if not value:
        raise ValueError("an empty string cannot be an attribute of a row")
    return {"S": value}


def number(value: float) -> AttributeValue:
    """Return an N attribute with at most six decimals, rounded half up, without trailing zeros.

    Raises:
        ValueError: The number is not finite.
    """
    if type(value) is int:
        return {"N": str(value)}
    exact = Decimal(repr(value))
    if not exact.is_finite():
        raise ValueError(f"{value} cannot be stored as a number")
    rounded = exact.quantize(_MICRO, ROUND_HALF_UP).normalize()
    return {"N": format(rounded, "f") if rounded else "0"}


def string_set(values: Iterable[str]) -> AttributeValue:
    """Return an SS attribute with sorted values, so that equal sets are equal.

    Raises:
        ValueError: There is no value, or an empty one. DynamoDB has no empty sets.
    """
    texts = sorted(set(values))
    if not texts or not all(texts):
        raise ValueError("a string set needs at least one string, and no empty one")
    return {"SS": texts}


@dataclass(frozen=True, slots=True)
class Attribute:
    """How one value is stored: in an attribute, or in the two of a position or a range.

    Attributes:
        name: The attribute; the first one of two.
        read: Returns the value. None: it is absent, or of another type. Raises `ValueError` outside
            of its limits.
        write: Returns the attributes of a value that is not None. An empty set has none.
        is_alone: Only the attribute `name` is read, so a row without it has no value.
    """

    name: str
    read: Callable[[Item], Any]
    write: Callable[[Any], Item]
    is_alone: bool = True


def a_name(name: str, most_bytes: int = MAX_NAME_CHARACTERS) -> Attribute:
    """Return an S attribute with a name; see `name_of`."""
    return Attribute(
        name,
        lambda item: name_of(item, name, most_bytes),
        lambda value: {name: string(value)},
    )


def a_whole(name: str, most: int = MAX_LONG) -> Attribute:
    """Return an N attribute with a whole number; see `int_of`."""
    return Attribute(
        name,
        lambda item: int_of(item, name, most=most),
        lambda value: {name: number(value)},
    )


def a_position(name: str, sub_name: str) -> Attribute:
    """Return the S and N attributes of a position. A missing sub-sequence number is 0."""

    def read(item: Item) -> Position | None:
        text = text_of(item, name)
        return None if text is None else Position(text, int_of(item, sub_name) or 0)

    def write(position: Position) -> Item:
        return {
            name: string(position.sequence_number),
            sub_name: number(position.sub_sequence_number),
        }

    return Attribute(name, read, write)


def some_shard_ids(name: str) -> Attribute:
    """Return an SS attribute of at most `MAX_RELATED_SHARDS` shard ids; without one it is empty."""

    def read(item: Item) -> frozenset[str]:
        values: list[Any] = _bounded(item, name, "SS", list, MAX_RELATED_SHARDS, "shards")
        return frozenset(checked_shard_id(value, name) for value in values)

    return Attribute(name, read, lambda ids: {name: string_set(ids)} if ids else {})


def some_bytes(name: str) -> Attribute:
    """Return a B attribute. Empty bytes are absent."""

    def read(item: Item) -> bytes | None:
        value = _value(item, name, "B")
        return bytes(value) if isinstance(value, bytes | bytearray) and value else None

    return Attribute(name, read, lambda value: {name: {"B": value}} if value else {})


REQUIRED: Final = "required"
"""In the annotation of a field: a row without its attribute cannot be read."""


class RowCodec(Generic[_T]):
    """Converts rows from and to the values of a dataclass.

    A field that is stored has its `Attribute` in its annotation.

    Args:
        kind: The class.
    """

    def __init__(self, kind: type[_T]) -> None:
        self._kind = kind
        self._attributes: dict[str, Attribute] = {}
        self._readers: list[tuple[str, Attribute, bool]] = []
        for name, hint in get_type_hints(kind, include_extras=True).items():
            metadata = getattr(hint, "__metadata__", ())
            for one in metadata:
                if isinstance(one, Attribute):
                    self._attributes[name] = one
                    self._readers.append((name, one, REQUIRED in metadata))

    def read(self, item: Item, **values: Any) -> _T:
        """Return the values of a row.

        Args:
            item: The row.
            values: Values of fields that are not stored.

        Raises:
            ValueError: An attribute is missing, or outside of its limits. Use in `readable`.
        """
        for name, attribute, is_required in self._readers:
            if attribute.is_alone and not is_required and attribute.name not in item:
                continue  # most rows have few of the attributes
            value = attribute.read(item)
            if value is not None:
                values[name] = value
            elif is_required:
                required(value, attribute.name)
        return self._kind(**values)

    def write(self, row: _T, *names: str) -> Item:
        """Return the attributes of a row: those of these fields, or of all."""
        return self.attributes(**{name: getattr(row, name) for name in names or self._attributes})

    def attributes(self, **values: Any) -> Item:
        """Return the attributes of single values. None has none."""
        item: Item = {}
        for name, value in values.items():
            if value is not None:
                item |= self._attributes[name].write(value)
        return item


@dataclass(frozen=True, slots=True)
class Document(Generic[_T]):
    """A JSON document in one attribute of the client-version row.

    Attributes:
        name: The attribute.
        kind: Type of the document.
        most: Largest number of characters.
        advice: What an operator does about one that cannot be read.
    """

    name: str
    kind: type[_T]
    most: int
    advice: str

    def text(self, document: _T) -> str:
        """Return the value of the attribute: the same text for the same document."""
        return msgspec.json.encode(document, order="deterministic").decode()

    def parsed(self, text: str) -> _T:
        """Return the document.

        Raises:
            UnreadableRowError: The value is not such a document.
        """
        if len(text) > self.most:
            raise UnreadableRowError(
                f"the attribute {self.name} of the row Migration3.0 has {len(text)} characters, "
                f"more than {self.most}"
            )
        try:
            return msgspec.json.decode(text, type=self.kind)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise self.unreadable(error) from error

    def unreadable(self, error: Exception) -> UnreadableRowError:
        """Return the error of a document that cannot be used."""
        about = f"the attribute {self.name} of the row Migration3.0 cannot be read"
        return UnreadableRowError(f"{about} ({error}); {self.advice}")


LEASE_KEY: Final = "leaseKey"
ENTITY_TYPE: Final = "entityType"
LEASE_ENTITY: Final = "LEASE"
OWNER: Final = "leaseOwner"
COUNTER: Final = "leaseCounter"
OWNER_SWITCHES: Final = "ownerSwitchesSinceCheckpoint"
CHECKPOINT: Final = "checkpoint"
CHECKPOINT_SUB: Final = "checkpointSubSequenceNumber"
PENDING: Final = "pendingCheckpoint"
PENDING_SUB: Final = "pendingCheckpointSubSequenceNumber"
PENDING_STATE: Final = "pendingCheckpointState"
PARENTS: Final = "parentShardId"
CHILDREN: Final = "childShardIds"
STARTING_HASH_KEY: Final = "startingHashKey"
ENDING_HASH_KEY: Final = "endingHashKey"
THROUGHPUT: Final = "throughputKBps"
CHECKPOINT_OWNER: Final = "checkpointOwner"
STREAM: Final = "streamName"
SHARD_ID: Final = "shardId"
STREAM_CREATED: Final = "kclpStreamCreated"
READ_UP_TO: Final = "kclpReadUpTo"
INITIAL_TIMESTAMP: Final = "kclpInitialTimestamp"
TABLE: Final = "kclpTable"
SEEK: Final = "kclpSeek"
"""Identifies the last seek of an operator, so that a repeated write is recognised."""
_HASH_KEY: Final = re.compile(r"[0-9]{1,39}")
"""A hash key has 128 bits, so at most 39 digits (Kinesis)."""

_STREAM_OF_KEY: Final = re.compile(r"[0-9]{1,20}:[A-Za-z0-9_.-]{1,128}:[0-9]{1,20}")
"""The stream in a multi-stream lease key: account, name, creation epoch (protocol §1.3).

The name has Kinesis' pattern of StreamName. 20 digits are our own limit for the numbers.
"""

MAX_THROUGHPUT_KBPS: Final = 1e9
"""Largest throughput of a lease (our own limit, a terabyte per second). The planner adds them."""


def _read_key(item: Item) -> str | None:
    key = text_of(item, LEASE_KEY)
    if key is None:
        return None
    checked_name(key, LEASE_KEY, MAX_KEY_BYTES)
    stream, colon, shard_id = key.rpartition(":")
    checked_shard_id(shard_id, LEASE_KEY)
    if colon and not _STREAM_OF_KEY.fullmatch(stream):
        raise ValueError(f"{LEASE_KEY} begins with '{printable(stream)}', which is not a stream")
    return key


def _read_stream(item: Item) -> str | None:
    stream, _, _ = (text_of(item, LEASE_KEY) or "").rpartition(":")
    attribute = text_of(item, STREAM)
    if attribute is not None and attribute != stream:
        raise ValueError(f"{STREAM} is '{printable(attribute)}', but the key has another stream")
    return stream or None


def _read_hash_range(item: Item) -> HashKeyRange | None:
    start, end = text_of(item, STARTING_HASH_KEY), text_of(item, ENDING_HASH_KEY)
    if start is None and end is None:
        return None
    if start is None or end is None:
        raise ValueError("the hash range has only one end")
    if not (_HASH_KEY.fullmatch(start) and _HASH_KEY.fullmatch(end)):
        shown = f"{printable(start, 50)}..{printable(end, 50)}"
        raise ValueError(f"the hash range {shown} is not made of hash keys")
    return HashKeyRange(int(start), int(end))


def _write_hash_range(keys: HashKeyRange) -> Item:
    return {STARTING_HASH_KEY: string(str(keys.start)), ENDING_HASH_KEY: string(str(keys.end))}


def _read_mark(item: Item) -> Position | None:
    text = name_of(item, TABLE)
    if text is None:
        return None
    sequence_number, _, sub = text.partition(" ")
    if not (sequence_number.isdigit() and sub.isdigit()):
        raise ValueError("the mark of the table has another form")
    return Position(sequence_number, int(sub))


def _write_mark(mark: Position) -> Item:
    return {TABLE: string(f"{mark.sequence_number} {mark.sub_sequence_number}")}


_KEY: Final = Attribute(LEASE_KEY, _read_key, lambda key: {LEASE_KEY: string(key)})
_STREAM: Final = Attribute(
    STREAM, _read_stream, lambda stream: {STREAM: string(stream)}, is_alone=False
)
_HASH_RANGE: Final = Attribute(
    STARTING_HASH_KEY, _read_hash_range, _write_hash_range, is_alone=False
)
_MARK: Final = Attribute(TABLE, _read_mark, _write_mark)
_KBPS: Final = Attribute(
    THROUGHPUT,
    lambda item: float_of(item, THROUGHPUT, least=0.0, most=MAX_THROUGHPUT_KBPS),
    lambda kbps: {THROUGHPUT: number(float(kbps))},
)


@dataclass(frozen=True, slots=True)
class Lease:
    """One row of the lease table. None means that the attribute is absent.

    Attributes:
        lease_key: Key of the row.
        checkpoint: Last position (inclusive) that is processed.
        counter: Lease counter. Every renewal and most other writes increment it.
        owner: The worker that should own the lease.
        checkpoint_owner: The previous owner, which still processes the shard during a handoff.
        owner_switches_since_checkpoint: KCL's count of changes of the owner.
        pending_checkpoint: Position that a record processor has prepared. The next checkpoint of a
            worker removes it.
        pending_checkpoint_state: State of the record processor at this position.
        parent_shard_ids: Shard ids of the parents.
        child_shard_ids: Shard ids of the children.
        hash_key_range: The hash keys of the shard.
        throughput_kbps: Moving average in KiB/s.
        stream: Stream of a multi-stream lease (`account:name:epoch`).
        recreated_millis: Creation time in epoch milliseconds of a single stream that was deleted
            and created again under this application (our own attribute `kclpStreamCreated` N, which
            Java readers ignore). None: the stream that the application began with.
        read_up_to_millis: All records of the shard that arrived by this time are in the table (our
            own attribute `kclpReadUpTo` N, epoch milliseconds, which Java readers ignore). None:
            unknown.
        initial_millis: Where the shard is read from while the checkpoint is AT_TIMESTAMP or LATEST
            (our own attribute `kclpInitialTimestamp` N, epoch milliseconds, which Java readers
            ignore). None: for AT_TIMESTAMP the time of the settings, for LATEST the end of the
            shard. At TRIM_HORIZON the time when a leader created the row, on the clock of Kinesis.
        table_mark: The last checkpoint that this package wrote and that the table of the sink had
            (our own attribute `kclpTable` S, which Java readers ignore). None: there is none, a
            seek or another sink followed it, or the sink stores no positions.
        seek: The last seek of an operator (our own attribute `kclpSeek` S, which Java readers
            ignore). None: there was none.
    """

    lease_key: Annotated[str, _KEY, REQUIRED]
    checkpoint: Annotated[Position, a_position(CHECKPOINT, CHECKPOINT_SUB), REQUIRED]
    counter: Annotated[int, a_whole(COUNTER, MAX_COUNTER), REQUIRED] = 0
    owner: Annotated[str | None, a_name(OWNER, MAX_KEY_BYTES)] = None
    checkpoint_owner: Annotated[str | None, a_name(CHECKPOINT_OWNER, MAX_KEY_BYTES)] = None
    owner_switches_since_checkpoint: Annotated[
        int, a_whole(OWNER_SWITCHES, MAX_COUNTER), REQUIRED
    ] = 0
    pending_checkpoint: Annotated[Position | None, a_position(PENDING, PENDING_SUB)] = None
    pending_checkpoint_state: Annotated[bytes | None, some_bytes(PENDING_STATE)] = None
    parent_shard_ids: Annotated[frozenset[str], some_shard_ids(PARENTS)] = frozenset()
    child_shard_ids: Annotated[frozenset[str], some_shard_ids(CHILDREN)] = frozenset()
    hash_key_range: Annotated[HashKeyRange | None, _HASH_RANGE] = None
    throughput_kbps: Annotated[float | None, _KBPS] = None
    stream: Annotated[str | None, _STREAM] = None
    recreated_millis: Annotated[int | None, a_whole(STREAM_CREATED)] = None
    read_up_to_millis: Annotated[int | None, a_whole(READ_UP_TO)] = None
    initial_millis: Annotated[int | None, a_whole(INITIAL_TIMESTAMP, MAX_MILLIS)] = None
    table_mark: Annotated[Position | None, _MARK] = None
    seek: Annotated[str | None, a_name(SEEK)] = None

    @property
    def unique_key(self) -> str:
        """The lease key, with the recreation time of a stream that was created again.

        The shards of such a stream have the same ids as those of the former stream.
        """
        return (
            self.lease_key
            if self.recreated_millis is None
            else f"{self.lease_key}@{self.recreated_millis}"
        )

    @property
    def shard_id(self) -> str:
        """The shard id, which is the last part of the lease key."""
        return self.lease_key.rsplit(":", 1)[-1]

    @property
    def actual_owner(self) -> str | None:
        """The worker that processes the shard: `checkpoint_owner` if present, else `owner`."""
        return self.checkpoint_owner or self.owner

    @property
    def in_handoff(self) -> bool:
        """Whether a handoff has started and is not finished."""
        return self.checkpoint_owner is not None

    @property
    def initial_timestamp(self) -> datetime | None:
        """`initial_millis` as a time; None if the row has none."""
        if self.initial_millis is None:
            return None
        return datetime.fromtimestamp(self.initial_millis / 1000, UTC)

    @property
    def ended(self) -> bool:
        """Whether the shard has been processed to its end."""
        return self.checkpoint.is_shard_end

    def with_(self, **changes: Any) -> Self:
        """Return a copy with some attributes changed."""
        return replace(self, **changes)

    def key_of_sibling(self, shard_id: str) -> str:
        """Return the lease key of another shard of the same stream."""
        return shard_id if self.stream is None else f"{self.stream}:{shard_id}"


LEASE_ROW: Final = RowCodec(Lease)


def stream_attributes(lease: Lease) -> Item:
    """Return the two attributes that only multi-stream rows have: stream and shard id."""
    if lease.stream is None:
        return {}
    return LEASE_ROW.attributes(stream=lease.stream) | {SHARD_ID: string(lease.shard_id)}


def lease_to_item(lease: Lease) -> Item:
    """Return the complete row of a lease, as it is put when the lease is created."""
    item = LEASE_ROW.write(lease) | stream_attributes(lease)
    if lease.pending_checkpoint is None:  # the state is that of a pending checkpoint
        item.pop(PENDING_STATE, None)
    return item | {ENTITY_TYPE: string(LEASE_ENTITY)}


def is_lease(item: Item) -> bool:
    """Return whether the row is a lease: `entityType` is LEASE, or missing (KCL before 3.5).

    A row of the coordinator state without `entityType` is recognised by its key (protocol §3.1).
    """
    entity = text_of(item, ENTITY_TYPE)
    if entity is None:
        return text_of(item, LEASE_KEY) not in COORDINATOR_KEYS
    return entity == LEASE_ENTITY


def lease_from_item(item: Item) -> Lease:
    """Return the lease of a row that `is_lease`.

    Raises:
        UnreadableRowError: The row cannot be read. The message says why.
    """
    with readable(lambda: f"the row {_shown_key(item)} is not a lease that can be read"):
        check_size(item)
        return LEASE_ROW.read(item)


def _shown_key(item: Item) -> str:
    return printable(text_of(item, LEASE_KEY) or "without a key")


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used.

    Attributes:
        table: Name of the table.
        key: Primary key of the row, with any characters.
        reason: What is wrong; printable.
        heartbeat: Digest of the attributes that a worker's report changes. Empty for rows of
            other tables.
    """

    table: str
    key: str
    reason: str
    heartbeat: str = ""


def read_rows(
    items: Iterable[Item], read: Callable[[Item], _T], bad: Callable[[Item, str], BadRow]
) -> tuple[tuple[_T, ...], tuple[BadRow, ...]]:
    """Read the rows of a scan. A row that cannot be read does not hide the others.

    Args:
        items: The rows.
        read: Reads one, or raises `UnreadableRowError`.
        bad: Returns what is reported of one that cannot be read; the text is the reason.
    """
    rows: list[_T] = []
    bad_rows: list[BadRow] = []
    for item in items:
        try:
            rows.append(read(item))
        except UnreadableRowError as error:
            bad_rows.append(bad(item, str(error)))
    return tuple(rows), tuple(bad_rows)


@dataclass(frozen=True, slots=True)
class LeaseListing:
    """The result of a scan.

    Attributes:
        leases: The leases, in no particular order.
        bad_rows: Rows that have the type of a lease, but cannot be used.
    """

    leases: tuple[Lease, ...]
    bad_rows: tuple[BadRow, ...] = ()

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Keys of the rows that cannot be used."""
        return tuple(row.key for row in self.bad_rows)

    def of_form(self, table: str, *, multi_stream: bool) -> LeaseListing:
        """Return the listing with leases of the other form as bad rows (protocol §1.3).

        The form is single-stream or multi-stream.
        """
        leases: list[Lease] = []
        bad_rows = list(self.bad_rows)
        for lease in self.leases:
            reason = other_form(lease, multi_stream=multi_stream)
            if reason is None:
                leases.append(lease)
            else:
                bad_rows.append(BadRow(table, lease.lease_key, reason))
        return LeaseListing(tuple(leases), tuple(bad_rows))


def other_form(lease: Lease, *, multi_stream: bool) -> str | None:
    """Return why the lease has the other form (single-stream or multi-stream); None if not."""
    if (lease.stream is not None) == multi_stream:
        return None
    if lease.stream is None:
        return (
            f"the lease {lease.lease_key} has no stream in its key: it is of a single-stream "
            "application, but the setting streams names several streams"
        )
    return (
        f"the lease {lease.lease_key} has the stream {lease.stream} in its key: it is of a "
        "multi-stream application, but the setting streams names one stream"
    )


MAX_REMEMBERED: Final = 1000
"""Largest number of rows that are reported at the same time (our own limit)."""


class RejectedRows:
    """Emits `RowRejected` for rows that are not reported yet. Thread-safe."""

    def __init__(self, events: EventSink) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._reported: dict[tuple[str, str], str] = {}

    def note(self, row: BadRow) -> None:
        """Report one row that cannot be used."""
        key = (row.table, row.key)
        with self._lock:
            is_known = self._reported.get(key) == row.reason
            is_full = key not in self._reported and len(self._reported) >= MAX_REMEMBERED
            if is_known or is_full:
                return
            self._reported[key] = row.reason
        self._events(RowRejected(row.table, row.key, row.reason))

    def note_all(self, rows: Iterable[BadRow]) -> None:
        """Report all bad rows of a scan.

        Rows that are not among them are forgotten. If they occur again, they are reported again.
        """
        found = {(row.table, row.key): row for row in rows}
        with self._lock:
            for key in [key for key in self._reported if key not in found]:
                del self._reported[key]
        for row in found.values():
            self.note(row)

    def forget(self, table: str, key: str) -> None:
        """Forget a row that can be used again, or does not exist any more."""
        with self._lock:
            self._reported.pop((table, key), None)
