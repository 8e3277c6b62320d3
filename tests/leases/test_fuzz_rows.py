"""Rows that nobody should have written, and settings that nobody should have set: one clear
message, nothing written, nothing dies.
"""

from __future__ import annotations

import contextlib
import copy
import re

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from pydantic import ValidationError

from kcl_pipeline.batch import Batch
from kcl_pipeline.cli.failures import sentence
from kcl_pipeline.config import ConsumerSettings, LeaseSettings
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.errors import AwsError, SettingsError, UnreadableRowError
from kcl_pipeline.events import RowRejected
from kcl_pipeline.leases.coordinator import lock_from_item, migration_from_item
from kcl_pipeline.leases.held import HeldLeases
from kcl_pipeline.leases.row import Lease, is_lease, lease_from_item
from kcl_pipeline.leases.workers import is_worker, worker_from_item
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
    create_lease,
)
from tests.support.examples import examples
from tests.support.leader_world import World
from verification.interleavings.world import Bench, Process, Scenario, Worker

QUICK = examples(150, suppress_health_check=list(HealthCheck))
FEW = examples(20, suppress_health_check=list(HealthCheck))

numbers = st.one_of(
    st.integers(-(10**37), 10**37).map(str),
    st.decimals(allow_nan=False, allow_infinity=False, places=6).map(str),
    st.sampled_from(["0", "-1", "1E+125", "1E-130", "0.5", "9" * 38]),
)
texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "TRIM_HORIZON",
            "SHARD_END",
            "LATEST",
            "AT_TIMESTAMP",
            "12",
            "x:y:1",
            "LEASE",
            "LEADER",
            "CLIENT_VERSION_3X",
        ]
    ),
)
values = st.recursive(
    st.one_of(
        texts.map(lambda t: {"S": t}),
        numbers.map(lambda n: {"N": n}),
        st.binary(max_size=20).map(lambda b: {"B": b}),
        st.booleans().map(lambda b: {"BOOL": b}),
        st.just({"NULL": True}),
        st.lists(texts, min_size=1, max_size=3, unique=True).map(lambda t: {"SS": t}),
        st.lists(numbers, min_size=1, max_size=3, unique=True).map(lambda n: {"NS": n}),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: {"L": items}),
        st.dictionaries(st.sampled_from("CVX"), inner, max_size=3).map(lambda m: {"M": m}),
    ),
    max_leaves=6,
)

LEASE_NAMES = [
    "leaseOwner", "leaseCounter", "ownerSwitchesSinceCheckpoint", "checkpoint",
    "checkpointSubSequenceNumber",
    "pendingCheckpoint", "entityType",
    "pendingCheckpointSubSequenceNumber", "pendingCheckpointState", "parentShardId",
    "childShardIds", "startingHashKey", "endingHashKey",
    "throughputKBps",
    "checkpointOwner", "streamName", "shardId", "somethingElse",
]  # fmt: skip
WORKER_NAMES = [
    "lut",
    "sts",
    "opr",
    "sup",
    "slu",
    "kclpDrain",
    "kclpRunId",
    "kclpCpu",
    "kclpReplaces",
    "kclpFormerRun",
    "kclpFormerEnded",
    "entityType",
    "x",
]
LOCK_NAMES = ["ownerName", "leaseDuration", "recordVersionNumber", "isReleased", "entityType"]
MIGRATION_NAMES = ["cv", "mb", "mts", "h", "entityType"]


def rows(key_name: str, names: list[str]) -> st.SearchStrategy[dict]:
    keys = st.text(min_size=1, max_size=20).map(lambda key: {key_name: {"S": key}})
    return st.builds(
        lambda key, rest: {**rest, **key},
        keys,
        st.dictionaries(st.sampled_from(names), values, max_size=len(names)),
    )


def nearly_a_lease(changes: dict) -> dict:
    good = {
        "leaseCounter": {"N": "3"},
        "ownerSwitchesSinceCheckpoint": {"N": "0"},
        "checkpoint": {"S": "TRIM_HORIZON"},
        "leaseOwner": {"S": "w1"},
    }
    return {**good, **changes}


lease_rows = st.one_of(
    rows("leaseKey", LEASE_NAMES), rows("leaseKey", LEASE_NAMES).map(nearly_a_lease)
)


def one_message(call, *arguments: object) -> None:
    found = None
    try:
        call(*arguments)
    except UnreadableRowError as error:
        found = error
    assert found is None or str(found).startswith("the row ")
    assert found is None or isinstance(found, (AwsError, ValueError)), (
        "code that retries errors of a table retries this too"
    )


@QUICK
@given(lease_rows)
def test_any_lease_row_is_read_or_refused(item: dict) -> None:
    if is_lease(item):
        one_message(lease_from_item, item)


@QUICK
@given(rows("wid", WORKER_NAMES))
def test_any_worker_row_is_read_or_refused(item: dict) -> None:
    if is_worker(item):
        one_message(worker_from_item, item, "wid")


@QUICK
@given(rows("key", LOCK_NAMES))
def test_any_lock_is_read_or_refused(item: dict) -> None:
    one_message(lock_from_item, item)


@QUICK
@given(rows("key", MIGRATION_NAMES))
def test_any_client_version_is_read_or_refused(item: dict) -> None:
    one_message(migration_from_item, item)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: lease_from_item({"leaseKey": {"S": "s0"}}),
            "the row s0 is not a lease that can be read: checkpoint is missing",
        ),
        (
            lambda: worker_from_item(
                {
                    "wid": {"S": "w"},
                    "lut": {"N": "1"},
                    "opr": {"M": {"C": {"L": [{"N": "1E+400"}]}}},
                },
                "wid",
            ),
            "the row w is not a worker metrics row",
        ),
        (
            lambda: lock_from_item({"ownerName": {"S": "a"}, "leaseDuration": {"S": "long"}}),
            "the row Leader is not a leader lock that can be read: leaseDuration is 'long'",
        ),
        (
            lambda: migration_from_item({"cv": {"N": "3"}}),
            "the row Migration3.0 is not a client version that can be read: cv is missing",
        ),
    ],
)
def test_the_message_names_the_row_and_the_attribute(call, words: str) -> None:
    with pytest.raises(UnreadableRowError, match=words):
        call()


@FEW
@given(st.lists(lease_rows, max_size=4), st.lists(rows("wid", WORKER_NAMES), max_size=3))
def test_a_leader_survives_them_and_leaves_them_alone(
    leases: list[dict], workers: list[dict]
) -> None:
    world = World(shards=2)
    for item in workers:
        world.rows.plant(item)
    unreadable = {}
    for given_item in leases:
        item = {**given_item, "leaseOwner": {"S": "somebody"}}
        try:
            lease_from_item(item)
        except UnreadableRowError:
            if is_lease(item) and is_single_stream(item):
                world.leases.plant(item)
                unreadable[item["leaseKey"]["S"]] = copy.deepcopy(item)
    world.join("w1", "w2")
    world.leader()
    world.run(25)
    for report in world.reports:
        assert report.error is None or "\n" not in report.error
    assert all(world.leases.rows()[key] == item for key, item in unreadable.items()), (
        "nothing is written for what cannot be read"
    )
    assert set(world.reports[-1].unreadable) == set(unreadable)
    owned = {lease.owner for lease in world.table().values()}
    assert owned <= {"w1", "w2", None}, "the readable ones have owners"
    assert len(world.table()) == 2 or unreadable


def is_single_stream(item: dict) -> bool:
    return ":" not in item["leaseKey"]["S"]


@FEW
@given(st.lists(lease_rows, max_size=4))
def test_a_worker_survives_them_and_leaves_them_alone(items: list[dict]) -> None:
    clock, events = VirtualClock(), []
    table = InMemoryLeaseTable(clock=clock)
    create_lease(table, Lease("good", TRIM_HORIZON))
    table.assign(table.get("good"), "w1")
    planted = {}
    for item in items:
        with contextlib.suppress(ValueError):
            lease_from_item(item)
            continue
        if item["leaseKey"]["S"] != "good":
            table.plant({**item, "leaseOwner": {"S": "w1"}})
            planted[item["leaseKey"]["S"]] = table.rows()[item["leaseKey"]["S"]]
    readable = {key for key, item in planted.items() if is_lease(item) and _reads(item)}
    held = HeldLeases(table, "w1", LeaseSettings(), clock, events.append)
    held.recover()
    held.discover()
    held.renew_all()
    found = table.rows()
    assert "good" in {one.lease_key for one in held.held()}
    assert all(found[key] == item for key, item in planted.items() if key not in readable)
    broken = [key for key, item in planted.items() if key not in readable and is_lease(item)]
    assert len([event for event in events if isinstance(event, RowRejected)]) == len(broken), (
        "each is reported"
    )


def test_a_row_made_unreadable_stops_neither_the_commit_nor_the_worker() -> None:
    """A commit depends on the table alone. The row stays as somebody has written it."""
    bench = Bench(Scenario("one", (Worker("w1"),), leases=("s0", "s1")))
    broken = {"leaseKey": {"S": "s0"}, "leaseOwner": {"S": "w1"}, "checkpoint": {"S": "by hand"}}

    class Breaking:
        """Somebody writes the row while the first batch is written."""

        def write(self, batch: Batch) -> Batch:
            bench.table.plant(broken)
            return bench.writer.write(batch)

    leases = HeldLeases(bench.table, "w1", LeaseSettings(), bench.clock, bench.events.append)
    sink = bench.sink_for(lambda *_: None)
    Process("w1", leases, sink, Breaking(), bench.clock, bench.events.append, 1, 2).run()
    assert [held.lease_key for held in leases.held()] == ["s1"]
    assert bench.table.rows()["s0"] == broken
    assert sorted(bench.ranges()) == [("s0", 0, 1), ("s0", 1, 2), ("s1", 0, 1), ("s1", 1, 2)]


def _reads(item: dict) -> bool:
    try:
        lease_from_item(item)
    except UnreadableRowError:
        return False
    return True


@FEW
@given(rows("key", LOCK_NAMES), rows("key", MIGRATION_NAMES))
def test_a_leader_meets_any_coordinator_row(lock: dict, migration: dict) -> None:
    world = World(shards=1)
    planted = {
        "Leader": {**lock, "key": {"S": "Leader"}},
        "Migration3.0": {**migration, "key": {"S": "Migration3.0"}},
    }
    for item in planted.values():
        world.coordinator.plant(item)
    before = world.coordinator.rows()
    try:
        lock_from_item(planted["Leader"])
        migration_from_item(planted["Migration3.0"])
    except UnreadableRowError:
        report = world.leader().run_once()
        assert not report.led
        assert report.error
        assert report.error.startswith("the row ")
        assert world.coordinator.rows() == before
        assert world.leases.rows() == {}


def test_garbage_is_left_out_of_the_lists() -> None:
    workers, coordinator = InMemoryWorkerMetricsTable(), InMemoryCoordinatorStateTable()
    workers.plant({"wid": {"S": "w"}, "lut": {"S": "yesterday"}})
    assert workers.scan_workers().workers == ()
    coordinator.plant({"key": {"S": "Leader"}, "ownerName": {"N": "1"}})
    with pytest.raises(UnreadableRowError, match="ownerName is missing, or has another type"):
        coordinator.read_lock()


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)
FIELDS = {name: field.annotation for name, field in ConsumerSettings.model_fields.items()}
SECTIONS = {
    name: sorted(kind.model_fields)
    for name, kind in FIELDS.items()
    if hasattr(kind, "model_fields")
}
sections = st.one_of(
    st.sampled_from(sorted(SECTIONS)).flatmap(
        lambda name: st.dictionaries(
            st.sampled_from([*SECTIONS[name], "no_such_setting"]), JSON, max_size=3
        ).map(lambda values: {name: values})
    ),
    st.dictionaries(st.sampled_from([*SECTIONS, "no_such_section"]), JSON, max_size=2),
)


@QUICK
@given(sections)
def test_any_settings_are_taken_or_refused_with_a_sentence(overrides: dict) -> None:
    try:
        ConsumerSettings(application_name="orders-app", streams=("orders",), **overrides)
    except ValidationError as error:
        text = sentence(error)
        assert text is not None
        assert text.endswith((".", "?"))
        with pytest.raises(SettingsError, match=re.escape(text)):
            KinesisPipeline(
                "orders-app", ["orders"], DeltaSink("lake/orders"), settings_overrides=overrides
            )
    else:
        said = "lease_assignment_strategy"
        try:
            KinesisPipeline(
                "orders-app", ["orders"], DeltaSink("lake/orders"), settings_overrides=overrides
            )
        except SettingsError as error:
            said = str(error)
        assert "lease_assignment_strategy" in said


@QUICK
@given(JSON, JSON)
def test_any_names_are_taken_or_refused_with_a_sentence(name: object, streams: object) -> None:
    said = "it is taken"
    try:
        KinesisPipeline(name, streams, DeltaSink("lake/orders"))  # type: ignore[arg-type]
    except SettingsError as error:
        said = str(error)
    assert len(said.split()) >= 3
