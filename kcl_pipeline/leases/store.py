"""The interface of a table with conditional writes, which DynamoDB and the in-memory table have.

The tables above this interface (`writes.LeaseTable`, `workers.WorkerMetricsTable`,
`coordinator.CoordinatorStateTable`) decide on conditions, changes and the meaning of a refused
write. An implementation only applies them, atomically per row. These rules hold for every method
of a table (protocol §1.4, §2.3, §3):

* A write whose condition does not hold returns None or False. It does not raise.
* After `errors.UnavailableError` it is unknown whether a write was applied. The caller repeats the
  call with the same arguments. If the row has exactly the values of this write, the write counts
  as applied, although its condition does not hold any more (but see `LeaseTable.renew`).
* A row is not read, modified and put back. Unknown attributes are kept.
* Throttling raises `errors.ThrottledError`, a missing table `errors.NotFoundError`, a missing
  permission `errors.AccessDeniedError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Protocol

AttributeValue = dict[str, Any]
"""One attribute in the form of DynamoDB's API, such as `{"S": "text"}` or `{"N": "12"}`."""

Item = dict[str, AttributeValue]
"""One row. Items are not changed in place; a write creates a new one."""


@dataclass(frozen=True, slots=True)
class Equals:
    """The attribute is present and has this value. Numbers are compared as numbers."""

    attribute: str
    value: AttributeValue


@dataclass(frozen=True, slots=True)
class Absent:
    """The row does not have the attribute. With the key attribute: there is no row."""

    attribute: str


@dataclass(frozen=True, slots=True)
class Present:
    """The row has the attribute. With the key attribute: the row exists."""

    attribute: str


@dataclass(frozen=True, slots=True)
class AbsentOrEquals:
    """The row does not have the attribute, or it has this value."""

    attribute: str
    value: AttributeValue


@dataclass(frozen=True, slots=True)
class Differs:
    """The attribute is present and has another value."""

    attribute: str
    value: AttributeValue


@dataclass(frozen=True, slots=True)
class FirstEquals:
    """`attribute` has this value; or the row does not have it, and `fallback` has this value."""

    attribute: str
    fallback: str
    value: AttributeValue


Condition = Equals | Absent | Present | AbsentOrEquals | Differs | FirstEquals


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of an update, each to other attributes.

    Attributes:
        put: Attributes to set.
        remove: Attributes to remove.
        add: Amounts to add to numbers. An absent number is 0.
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
class ConditionCheck:
    """Require conditions of a row of any table, as a part of a transaction, without changing it."""

    store: RowStore
    key: str
    conditions: Sequence[Condition]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Change or delete a row of another table, as a part of a transaction.

    Attributes:
        store: The table.
        key: Key of the row.
        conditions: Conditions of this write.
        changes: The changes. None deletes the row.
    """

    store: RowStore
    key: str
    conditions: Sequence[Condition]
    changes: Changes | None = None


Write = Put | Update | ConditionCheck | Elsewhere


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a write.

    Attributes:
        applied: Whether the conditions held and the write was applied.
        item: The row after the write (None after a delete). If it was refused: the existing row.
    """

    applied: bool
    item: Item | None


class RowStore(Protocol):
    """One table with a string primary key.

    A write is applied only if all its conditions hold. Every call raises the errors of
    `kcl_pipeline.errors`. After `UnavailableError`, a write may or may not have been applied.
    """

    @property
    def name(self) -> str:
        """Name of the table."""
        ...

    @property
    def key_name(self) -> str:
        """Name of the primary key."""
        ...

    def ensure_exists(self) -> bool:
        """Create the table and its index if they are missing, and wait until they can be used.

        Returns:
            Whether this call created the table.

        Raises:
            IncompatibleTableError: The existing table has another key.
        """
        ...

    def get(self, key: str, *, consistent: bool = True) -> Item | None:
        """Return a row; None if there is none."""
        ...

    def put(self, item: Item, conditions: Sequence[Condition]) -> Outcome:
        """Replace the whole row."""
        ...

    def update(self, key: str, conditions: Sequence[Condition], changes: Changes) -> Outcome:
        """Change some attributes. Without conditions, a missing row is created."""
        ...

    def check(self, key: str, conditions: Sequence[Condition]) -> ConditionCheck:
        """Return conditions of a row of this table, for a transaction of any table."""
        ...

    def delete(self, key: str, conditions: Sequence[Condition]) -> Outcome:
        """Remove the row. Without conditions, a missing row is no error."""
        ...

    def scan(self, *, consistent: bool = False) -> Iterator[Item]:
        """Yield all rows, in no particular order."""
        ...


class LeaseStore(RowStore, Protocol):
    """The lease table, which has an index, and whose writes may be transactions."""

    def transact(self, writes: Sequence[Write]) -> frozenset[int]:
        """Apply all writes atomically, or none. Each is to another row; at most 100.

        Returns:
            Indexes of the writes whose conditions do not hold. Empty: all were applied.
        """
        ...

    def keys_by_owner(self, owner: str) -> tuple[str, ...]:
        """Return the primary keys in the index by `leaseOwner`. Eventually consistent."""
        ...


def same_value(value: AttributeValue | None, other: AttributeValue | None) -> bool:
    """Return whether two attributes are equal in DynamoDB: numbers by value, sets unordered."""
    if value is None or other is None or value == other:
        return value == other
    if value.keys() != other.keys():
        return False
    kind = next(iter(value), "")
    left, right = value.get(kind), other.get(kind)
    if kind == "N":
        return Decimal(str(left)) == Decimal(str(right))
    if kind in {"SS", "NS", "BS"}:
        return isinstance(left, list) and isinstance(right, list) and set(left) == set(right)
    return bool(left == right)


def same_item(item: Item | None, other: Item | None) -> bool:
    """Return whether two rows have the same attributes with the same values."""
    if item is None or other is None:
        return item is other
    return item.keys() == other.keys() and all(
        same_value(value, other[name]) for name, value in item.items()
    )
