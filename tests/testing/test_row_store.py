"""Faults of the in-memory row store: writes that are applied late, and scans in pages."""

import pytest

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.leases.store import Absent, Changes, Equals, Put
from kcl_pipeline.testing.row_store import LandsLate, MemoryStore


def table(rows=()):
    store = MemoryStore("leases", "leaseKey")
    for key in rows:
        store.plant({"leaseKey": {"S": key}, "leaseCounter": {"N": "1"}})
    return store


def late(store):
    """The next write is held up; returns the list to which it is added."""
    held = []

    def hook(operation, key):
        store.before_call = lambda *_: None
        raise LandsLate(UnavailableError(f"{operation} of {key} timed out"), held.append)

    store.before_call = hook
    return held


def test_a_late_write_answers_with_an_error_and_is_applied_when_it_arrives():
    store = table(["a"])
    held = late(store)
    with pytest.raises(UnavailableError, match="UpdateItem of a timed out"):
        store.update("a", [Equals("leaseCounter", {"N": "1"})], Changes(add={"leaseCounter": 1}))
    assert store.find("a")["leaseCounter"] == {"N": "1"}
    (apply,) = held
    apply()
    assert store.find("a")["leaseCounter"] == {"N": "2"}


def test_a_late_write_changes_nothing_when_its_condition_fails_by_then():
    store = table(["a"])
    held = late(store)
    conditions = [Equals("leaseCounter", {"N": "1"})]
    with pytest.raises(UnavailableError):
        store.update("a", conditions, Changes(add={"leaseCounter": 5}))
    assert store.update("a", conditions, Changes(add={"leaseCounter": 1})).applied
    (apply,) = held
    apply()
    assert store.find("a")["leaseCounter"] == {"N": "2"}


def test_a_late_transaction_is_applied_as_a_whole_or_not_at_all():
    store = table()
    rows = [{"leaseKey": {"S": key}} for key in ("a", "b")]
    writes = [Put(row, (Absent("leaseKey"),)) for row in rows]
    held = late(store)
    with pytest.raises(UnavailableError, match="TransactWriteItems of a,b"):
        store.transact(writes)
    store.plant(rows[1])
    (apply,) = held
    apply()
    assert list(store.rows()) == ["b"]


def test_a_scan_in_pages_takes_one_call_for_each_and_is_no_snapshot():
    store = table(["a", "b", "c", "d", "e"])
    store.scan_page_rows = 2
    calls = []

    def hook(operation, _key):
        calls.append(operation)
        if len(calls) == 2:
            store.erase("a")
            store.erase("d")

    store.before_call = hook
    assert [item["leaseKey"]["S"] for item in store.scan()] == ["a", "b", "c", "e"]
    assert calls == ["Scan"] * 2


@pytest.mark.parametrize(("rows", "calls"), [(0, 1), (2, 1), (3, 2)])
def test_a_scan_asks_for_no_page_that_is_empty(rows, calls):
    store = table([f"row-{number}" for number in range(rows)])
    store.scan_page_rows = 2
    made = []
    store.before_call = lambda operation, _key: made.append(operation)
    assert len(list(store.scan())) == rows
    assert len(made) == calls
