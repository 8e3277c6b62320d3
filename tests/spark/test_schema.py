"""The Arrow schema of a DataFrame is the same with every version of PySpark."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from kcl_pipeline.spark.schema import arrow_schema


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("t timestamp", pa.timestamp("us", "UTC")),
        ("t timestamp_ntz", pa.timestamp("us")),
        ("t array<timestamp>", pa.list_(pa.timestamp("us", "UTC"))),
        ("t string", pa.string()),
        ("t binary", pa.binary()),
        ("t decimal(10,2)", pa.decimal128(10, 2)),
    ],
)
@pytest.mark.spark
def test_types(spark, written, expected):
    schema = arrow_schema(StructType.fromDDL(written))
    found = schema.field("t").type
    if pa.types.is_list(found):
        assert found.value_type == expected.value_type
    else:
        assert found == expected
