"""Helpers of the positions models: sets of records as bits, and changes of tuples."""

from __future__ import annotations

from typing import Final, TypeVar

NOBODY: Final = -1
JAVA: Final = -2

_Value = TypeVar("_Value")


def bits(after: int, end: int) -> int:
    """The records of (after, end] as bits."""
    return (1 << end) - (1 << after) if end > after else 0


def at(values: tuple[_Value, ...], index: int, value: _Value) -> tuple[_Value, ...]:
    """The values with one of them replaced."""
    return (*values[:index], value, *values[index + 1 :])
