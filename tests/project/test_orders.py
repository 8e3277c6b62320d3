"""Test the transform, and the whole pipeline without AWS."""

from datetime import datetime

from assets.orders import orders
from kcl_pipeline.testing import PipelineTest, run_transform

ORDER = {"id": "a", "user": "ann", "amount": 1.5, "time": "2026-01-02T03:04:05Z"}


def test_a_record_becomes_a_row_with_typed_columns() -> None:
    result = run_transform(orders, [ORDER])
    assert result.errors == {}
    (row,) = result.rows
    assert (row["id"], row["user"], row["amount"]) == ("a", "ann", 1.5)
    assert isinstance(row["time"], datetime)


def test_what_is_no_order_becomes_a_dead_letter() -> None:
    without_id = {name: value for name, value in ORDER.items() if name != "id"}
    payloads = [ORDER, b"not JSON", b"[1]", without_id, ORDER | {"time": None}]
    result = run_transform(orders, payloads)
    assert [row["id"] for row in result.rows] == ["a"]
    assert sorted(result.errors) == [1, 2, 3, 4]


def test_rows_are_in_the_table_once_after_a_crash() -> None:
    with PipelineTest(orders, shards=2) as test:
        test.put(ORDER, ORDER | {"id": "b"}, b"not JSON")
        test.run_and_crash(after="commit")
        assert test.run().reason == "drained"
        assert sorted(row["id"] for row in test.rows()) == ["a", "b"]
        assert [letter["data"] for letter in test.dead_letters()] == [b"not JSON"]
