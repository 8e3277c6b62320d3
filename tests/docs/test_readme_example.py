"""The README's example runs, and hands bad records back instead of writing null rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    return names


def test_the_example_defines_a_pipeline(example: dict[str, Any]) -> None:
    assert example["orders"].name == "orders"
    assert {str(key) for key in example["defs"].resolve_asset_graph().get_all_asset_keys()}


@pytest.mark.spark
def test_bad_records_are_handed_back(example: dict[str, Any], spark: Any) -> None:
    records = spark.createDataFrame(
        [
            ("s", "1", 0, b'{"id": "a", "amount": 1.5, "time": "2026-01-02T03:04:05Z"}'),
            ("s", "2", 0, b"not json"),
            ("s", "3", 0, b'{"id": "c"}'),
            ("s", "4", 0, b'{"id": "d", "amount": "much", "time": "2026-01-02T03:04:05Z"}'),
        ],
        "shard_id string, sequence_number string, sub_sequence_number int, data binary",
    )
    rows = example["parse"](records).orderBy("sequence_number").collect()
    assert [row["_error"] is None for row in rows] == [True, False, False, False]
    assert rows[0]["amount"] == 1.5
