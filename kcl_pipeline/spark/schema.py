"""Convert the schema of a DataFrame to Arrow, with every supported version of PySpark."""

from __future__ import annotations

import inspect
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

# A PySpark without this parameter uses UTC by default.
_UTC: Final[dict[str, Any]] = (
    {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema of a DataFrame. Its timestamps have the time zone UTC."""
    return to_arrow_schema(schema, **_UTC)
