"""Rows and conditional writes as plain values, and the one protocol that DynamoDB and the in-memory
twin both speak.

Everything that decides is written once, above this protocol: conditions, effects, and what a
refused write means. A twin only has to apply what it is given, atomically per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Protocol

AttributeValue = dict[str, Any]
"""One attribute as DynamoDB's API has it: `{"S": "text"}`, `{"N": "12"}`, `{"B": b"..."}`, `{"SS":
[...]}`, `{"M": {...}}`, `{"L": [...]}`.
"""

Item = dict[str, AttributeValue]
"""One row. Items are never changed in place: a write makes a new one."""

MapCallable = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]
"""Like `map`, over a sequence: the caller decides whether the calls run one after the other or on
threads of its own.
"""


def serial_map(call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """One call after the other, in order."""
    return [call(item) for item in items] if items else []


@dataclass(frozen=True, slots=True)
class Equals:
    """The attribute is there and has this value (numbers are compared as numbers)."""

    attribute: str
    value: AttributeValue


@dataclass(frozen=True, slots=True)
class Absent:
    """The row does not have the attribute; the key attribute stands for the row itself."""

    attribute: str


@dataclass(frozen=True, slots=True)
class Present:
    """The row has the attribute; the key attribute stands for the row itself."""

    attribute: str


@dataclass(frozen=True, slots=True)
class AbsentOrEquals:
    """The row does not have the attribute, or it has this value."""

    attribute: str
    value: AttributeValue


@dataclass(frozen=True, slots=True)
class Differs:
    """The attribute is there and has another value."""

    attribute: str
    value: AttributeValue


Condition = Equals | Absent | Present | AbsentOrEquals | Differs


@dataclass(frozen=True, slots=True)
class Changes:
    """What an update does: set attributes, remove attributes, add to numbers (an absent number
    counts as 0). The three do not overlap.
    """

    put: Mapping[str, AttributeValue] = field(default_factory=dict)
    remove: tuple[str, ...] = ()
    add: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Put:
    """Replace a whole row, as a part of a transaction."""

    item: Item
    conditions: Sequence[Condition]


@dataclass(frozen=True, slots=True)
class Update:
    """Change some attributes of a row, as a part of a transaction."""

    key: str
    conditions: Sequence[Condition]
    changes: Changes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a write. `item`: the row after it when applied (None after a delete), the row
    as it was found when refused.
    """

    applied: bool
    item: Item | None


class RowStore(Protocol):
    """One table with a string primary key `key_name`.

    Every call raises the errors of `kcl_pipeline.errors`; `Unavailable` leaves open whether a write
    was applied. All conditions of a write must hold, else nothing is changed and the outcome is
    refused.
    """

    name: str
    key_name: str

    def ensure_exists(self, check: Callable[[], None]) -> bool:
        """Create what is missing and wait until usable; True when the table was created here.

        `check` runs on a table found, before it is changed.
        """
        ...

    def get(self, key: str, *, consistent: bool = True) -> Item | None:
        """One row."""
        ...

    def put(self, item: Item, conditions: Sequence[Condition]) -> Outcome:
        """Replace the whole row."""
        ...

    def update(self, key: str, conditions: Sequence[Condition], changes: Changes) -> Outcome:
        """Change some attributes; without conditions a missing row is made."""
        ...

    def transact(self, writes: Sequence[Put | Update]) -> frozenset[int]:
        """Make all writes at one instant, or none; each to another row.

        Returns the places in `writes` whose conditions do not hold; empty: all were made.
        """
        ...

    def delete(self, key: str, conditions: Sequence[Condition]) -> Outcome:
        """Remove the row; a missing row is fine when there are no conditions."""
        ...

    def scan(self, *, consistent: bool = False) -> Iterator[Item]:
        """All rows in no particular order."""
        ...

    def keys_by_owner(self, owner: str) -> tuple[str, ...]:
        """Primary keys found in the index by `leaseOwner`; eventually consistent."""
        ...


def same_value(one: AttributeValue | None, other: AttributeValue | None) -> bool:
    """Equality as DynamoDB has it: numbers by value, sets without order."""
    if one is None or other is None or one == other:
        return one == other
    if one.keys() != other.keys():
        return False
    kind = next(iter(one), "")
    left, right = one.get(kind), other.get(kind)
    if kind == "N":
        return Decimal(str(left)) == Decimal(str(right))
    if kind in {"SS", "NS", "BS"}:
        return isinstance(left, list) and isinstance(right, list) and set(left) == set(right)
    return bool(left == right)


def same_item(one: Item | None, other: Item | None) -> bool:
    """Whether two rows have the same attributes with the same values."""
    if one is None or other is None:
        return one is other
    return one.keys() == other.keys() and all(
        same_value(value, other[name]) for name, value in one.items()
    )


def holds(condition: Condition, item: Item | None) -> bool:
    """Whether the condition is true of a row (None: there is no row)."""
    value = None if item is None else item.get(condition.attribute)
    match condition:
        case Absent():
            return value is None
        case Present():
            return value is not None
        case Equals(_, wanted):
            return same_value(value, wanted)
        case AbsentOrEquals(_, wanted):
            return value is None or same_value(value, wanted)
        case Differs(_, unwanted):
            return value is not None and not same_value(value, unwanted)


def changed(item: Item | None, key_name: str, key: str, changes: Changes) -> Item:
    """The row that an update makes of `item`."""
    result = dict(item) if item is not None else {key_name: {"S": key}}
    result.update(changes.put)
    for name in changes.remove:
        result.pop(name, None)
    for name, amount in changes.add.items():
        result[name] = {"N": str(Decimal(str(result.get(name, {"N": "0"})["N"])) + amount)}
    return result
