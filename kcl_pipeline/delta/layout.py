"""Check partition values against the partition columns of a table.

A partition value is stored only in the log, not in the file. A value that does not fit its
column's type makes the table unreadable. Values from outside are therefore checked before a commit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import pyarrow as pa

_DATE: Final = r"(?!0000)[0-9]{4}-[0-9]{2}-[0-9]{2}"
_NUMBER: Final = r"-?[0-9]{1,40}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?"
_FORMS: Final[tuple[tuple[Callable[[Any], bool], str], ...]] = (
    (pa.types.is_string, r"[^\0]*"),
    (pa.types.is_signed_integer, r"-?[0-9]{1,19}"),
    (pa.types.is_date32, _DATE),
    (pa.types.is_timestamp, _DATE + r"[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z?"),
    (pa.types.is_boolean, "true|false"),
    (pa.types.is_decimal, _NUMBER),
    (pa.types.is_floating, _NUMBER + "|-?(Infinity|inf)|NaN|nan"),
)
"""The form of a value by the type of its column. pyarrow alone accepts more than readers do."""


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The part of a table's metadata that decides which files fit.

    Attributes:
        digest: Hash of the table id, the partition columns and the schema. A batch that was checked
            against one digest fits every table with an equal digest.
        partitions: The partition columns in the table's order, with their types.
    """

    digest: str
    partitions: Mapping[str, pa.DataType]

    def problem(self, values: Mapping[str, str | None]) -> str | None:
        """Why a file with these partition values does not fit; None if it fits."""
        if set(values) != set(self.partitions):
            return f"its partition columns are not {list(self.partitions)}"
        for name, kind in self.partitions.items():
            value = values[name]
            if value is not None and not _fits(value, kind):
                return f"a value of the partition column {name} is not of type {kind}"
        return None


def _fits(value: str, kind: pa.DataType) -> bool:
    form = next((form for applies, form in _FORMS if applies(kind)), None)
    if form is None or re.fullmatch(form, value, re.DOTALL) is None:
        return False
    try:
        if pa.types.is_decimal(kind):  # the cast of a string does not notice an overflow
            pa.scalar(Decimal(value), kind)
        elif pa.types.is_timestamp(kind):  # the cast wants a zone for one of the two kinds alone
            pa.scalar(value.removesuffix("Z")).cast(pa.timestamp("us"))
        else:
            pa.scalar(value).cast(kind)
    except (InvalidOperation, pa.ArrowInvalid):
        return False
    return True
