"""The worker-metrics and coordinator-state tables, on both kinds of tables.

See protocol §2, §3 and appendix A.9 to A.11.
"""

import dataclasses

import pytest

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.leases.coordinator import LeaderLock, MigrationState
from kcl_pipeline.leases.workers import WorkerMetrics

# fixtures
from tests.support.lease_tables import aws_fixture, client_fixture, tables_fixture  # noqa: F401

W1 = WorkerMetrics("w1", 1760000000, {"C": (10.5, 11.25)}, {"C": (100,)}, support_code=1)
LOCK = LeaderLock("w1", 120000, "v1")
NEXT = LeaderLock("w2", 30000, "v2")


def workers(tables):
    return tables.rows(tables.workers)


def lock_row(tables):
    return tables.rows(tables.coordinator).get("Leader")


def migration_row(tables):
    return tables.rows(tables.coordinator).get("Migration3.0")


def test_a_worker_without_a_metric_of_java_has_an_attribute_of_its_own(tables):
    own = dataclasses.replace(W1, stats={}, operating_range={}, own_cpu=(10.5, -1.0))
    assert tables.workers.report(own) == own
    found = workers(tables)["w1"]
    assert (found["sts"], found["opr"]) == ({"M": {}}, {"M": {}})
    assert found["kclpCpu"] == {"L": [{"N": "10.5"}, {"N": "-1"}]}
    assert tables.workers.scan_workers().workers == (own,)
    restarted = dataclasses.replace(W1, run_id="elsewhere")
    tables.workers.report(dataclasses.replace(own, run_id="here"))
    assert tables.workers.report(restarted).own_cpu == ()
    assert "kclpCpu" not in workers(tables)["w1"]


def test_a_successor_names_the_worker_that_it_replaces(tables):
    successor = dataclasses.replace(W1, run_id="run-2", replaces="w0")
    assert tables.workers.report(successor) == successor
    assert workers(tables)["w1"]["kclpReplaces"] == {"S": "w0"}
    assert tables.workers.scan_workers().workers == (successor,)
    restarted = dataclasses.replace(W1, run_id="run-3")
    assert tables.workers.report(restarted).replaces is None


def test_the_process_that_lost_its_worker_id_is_noted_in_the_row_of_the_other(tables):
    tables.workers.report(dataclasses.replace(W1, run_id="run-2"))
    assert tables.workers.note_former_run("w1", "run-1", "run-2", 1_760_000_000_000)
    (row,) = tables.workers.scan_workers().workers
    assert (row.former_run_id, row.former_ended_millis) == ("run-1", 1_760_000_000_000)
    stored = tables.workers.report(dataclasses.replace(W1, run_id="run-2"), takes_over=False)
    assert stored.former_run_id == "run-1", "a report keeps it"
    assert not tables.workers.note_former_run("w1", "run-0", "run-1", 1), "run-2 has the row"
    stored = tables.workers.report(dataclasses.replace(W1, run_id="run-3"))
    assert stored.former_run_id == "run-1", "so does the next process"
    tables.workers.deregister("w1", "run-3")
    assert not tables.workers.note_former_run("w1", "run-1", "run-3", 1)
    assert workers(tables) == {}, "a row that was deleted stays so"


def test_appendix_a9_rows(tables):
    assert tables.workers.report(W1) == W1
    tables.workers.report(WorkerMetrics("w2", 1760000003, support_code=1))
    assert workers(tables) == {
        "w1": {
            "wid": {"S": "w1"},
            "entityType": {"S": "WORKER_METRIC_STATS"},
            "lut": {"N": "1760000000"},
            "sts": {"M": {"C": {"L": [{"N": "10.5"}, {"N": "11.25"}]}}},
            "opr": {"M": {"C": {"L": [{"N": "100"}]}}},
            "sup": {"N": "1"},
            "slu": {"N": "1760000000"},
        },
        "w2": {
            "wid": {"S": "w2"},
            "entityType": {"S": "WORKER_METRIC_STATS"},
            "lut": {"N": "1760000003"},
            "sts": {"M": {}},
            "opr": {"M": {}},
            "sup": {"N": "1"},
            "slu": {"N": "1760000003"},
        },
    }
    assert sorted(tables.workers.scan_workers().workers, key=lambda w: w.worker_id) == [
        W1,
        WorkerMetrics("w2", 1760000003, support_code=1),
    ]


def test_numbers_have_six_decimals_rounded_half_up(tables):
    tables.workers.report(dataclasses.replace(W1, stats={"C": (-1, 33.3333335, 1e-9, 100.0)}))
    assert workers(tables)["w1"]["sts"]["M"]["C"]["L"] == [
        {"N": "-1"},
        {"N": "33.333334"},
        {"N": "0"},
        {"N": "100"},
    ]


def test_a_report_changes_its_own_attributes_only(tables):
    tables.plant(
        tables.workers,
        {"wid": {"S": "w1"}, "lut": {"N": "5"}, "future": {"S": "x"}, "sup": {"N": "1"}},
    )
    tables.workers.report(dataclasses.replace(W1, support_code=None))
    assert workers(tables)["w1"]["future"] == {"S": "x"}
    assert workers(tables)["w1"]["sup"] == {"N": "1"}
    assert "slu" not in workers(tables)["w1"]


def test_rows_that_cannot_be_read_are_left_out(tables):
    tables.plant(
        tables.workers,
        {"wid": {"S": "old"}, "lut": {"N": "7"}, "sts": {"M": {"C": {"L": [{"N": "1"}]}}}},
    )
    tables.plant(tables.workers, {"wid": {"S": "no time"}})
    tables.plant(
        tables.workers, {"wid": {"S": "other"}, "lut": {"N": "7"}, "entityType": {"S": "STREAM"}}
    )
    assert tables.workers.scan_workers().workers == (
        WorkerMetrics("old", 7, {"C": (1.0,)}, support_code=None),
    )


def test_drain_reaches_the_run_it_was_meant_for(tables):
    assert not tables.workers.request_drain("w1")
    assert workers(tables) == {}
    run = dataclasses.replace(W1, run_id="run-1")
    assert not tables.workers.report(run).drain_requested
    assert tables.workers.request_drain("w1")
    assert tables.workers.report(run).drain_requested
    assert tables.workers.scan_workers().workers[0].drain_requested
    successor = tables.workers.report(dataclasses.replace(W1, run_id="run-2"))
    assert (successor.drain_requested, successor.run_id) == (False, "run-2")
    assert "kclpDrain" not in workers(tables)["w1"]


def test_delete_only_the_row_that_was_read(tables):
    tables.workers.report(W1)
    tables.workers.report(dataclasses.replace(W1, last_update_seconds=1760000030))
    assert not tables.workers.delete(W1)
    assert tables.workers.delete(dataclasses.replace(W1, last_update_seconds=1760000030))
    assert tables.workers.delete(W1)
    tables.workers.report(W1)
    tables.workers.deregister("w1")
    tables.workers.deregister("w1")
    assert workers(tables) == {}


def test_appendix_a10_lock_row_and_its_life(tables):
    table = tables.coordinator
    assert table.read_lock() is None
    assert table.put_lock(LOCK, replacing=None)
    assert lock_row(tables) == {
        "key": {"S": "Leader"},
        "entityType": {"S": "LEADER"},
        "ownerName": {"S": "w1"},
        "leaseDuration": {"S": "120000"},
        "recordVersionNumber": {"S": "v1"},
    }
    assert table.read_lock() == LOCK
    assert not table.put_lock(NEXT, replacing=None)
    assert not table.put_lock(NEXT, replacing=LeaderLock("w1", 1, "v0"))
    assert table.heartbeat_lock(LOCK, "v1b")
    assert not table.heartbeat_lock(LOCK, "v1c")
    assert not table.put_lock(NEXT, replacing=LOCK)
    assert table.put_lock(NEXT, replacing=table.read_lock())
    assert table.read_lock() == NEXT
    assert not table.heartbeat_lock(LeaderLock("w1", 30000, "v2"), "v3")


def test_a_steal_replaces_the_whole_item(tables):
    tables.coordinator.put_lock(LOCK, replacing=None)
    tables.plant(tables.coordinator, lock_row(tables) | {"data": {"B": b"x"}})
    assert tables.coordinator.put_lock(NEXT, replacing=LOCK)
    assert "data" not in lock_row(tables)


def test_a_released_lock_is_free(tables):
    released = LeaderLock("w1", 120000, "v1", is_released=True)
    tables.coordinator.put_lock(released, replacing=None)
    assert lock_row(tables)["isReleased"] == {"S": "1"}
    assert tables.coordinator.read_lock() == released
    assert tables.coordinator.put_lock(NEXT, replacing=released)
    assert not tables.coordinator.put_lock(LOCK, replacing=released)
    assert tables.coordinator.read_lock() == NEXT


def test_release(tables):
    table = tables.coordinator
    assert table.release_lock(LOCK)
    table.put_lock(LOCK, replacing=None)
    assert not table.release_lock(dataclasses.replace(LOCK, version="v0"))
    assert table.release_lock(NEXT)
    assert lock_row(tables) is not None
    assert table.release_lock(LOCK)
    assert lock_row(tables) is None


V3 = MigrationState(
    "CLIENT_VERSION_3X", "w1", 1760000000123, (("CLIENT_VERSION_INIT", "w1", 1760000000100),)
)

LOSABLE = {
    "report": ("UpdateItem", lambda t: None, lambda t: t.workers.report(W1)),
    "drain": (
        "UpdateItem",
        lambda t: t.workers.report(W1),
        lambda t: t.workers.request_drain("w1"),
    ),
    "delete worker": ("DeleteItem", lambda t: t.workers.report(W1), lambda t: t.workers.delete(W1)),
    "deregister": (
        "DeleteItem",
        lambda t: t.workers.report(W1),
        lambda t: t.workers.deregister("w1") is None,
    ),
    "create lock": (
        "PutItem",
        lambda t: None,
        lambda t: t.coordinator.put_lock(LOCK, replacing=None),
    ),
    "steal lock": (
        "PutItem",
        lambda t: t.coordinator.put_lock(LOCK, replacing=None),
        lambda t: t.coordinator.put_lock(NEXT, replacing=LOCK),
    ),
    "heartbeat": (
        "UpdateItem",
        lambda t: t.coordinator.put_lock(LOCK, replacing=None),
        lambda t: t.coordinator.heartbeat_lock(LOCK, "v9"),
    ),
    "release": (
        "DeleteItem",
        lambda t: t.coordinator.put_lock(LOCK, replacing=None),
        lambda t: t.coordinator.release_lock(LOCK),
    ),
    "create version": (
        "PutItem",
        lambda t: None,
        lambda t: t.coordinator.put_migration(V3, replacing=None),
    ),
    "roll forward": (
        "UpdateItem",
        lambda t: t.coordinator.put_migration(
            dataclasses.replace(V3, client_version="CLIENT_VERSION_3X_WITH_ROLLBACK"),
            replacing=None,
        ),
        lambda t: t.coordinator.put_migration(V3, replacing=t.coordinator.read_migration()),
    ),
}


@pytest.mark.parametrize("name", LOSABLE)
def test_a_write_whose_answer_was_lost_is_true_when_repeated(tables, name):
    operation, prepare, write = LOSABLE[name]
    prepare(tables)
    tables.lose_answer(operation)
    with pytest.raises(UnavailableError, match=operation):
        write(tables)
    after_loss = (tables.rows(tables.workers), tables.rows(tables.coordinator))
    assert write(tables)
    assert (tables.rows(tables.workers), tables.rows(tables.coordinator)) == after_loss


def test_appendix_a11_client_version_row(tables):
    assert tables.coordinator.put_migration(V3, replacing=None)
    assert migration_row(tables) == {
        "key": {"S": "Migration3.0"},
        "entityType": {"S": "CLIENT_VERSION_MIGRATION"},
        "cv": {"S": "CLIENT_VERSION_3X"},
        "mb": {"S": "w1"},
        "mts": {"N": "1760000000123"},
        "h": {
            "L": [
                {
                    "M": {
                        "cv": {"S": "CLIENT_VERSION_INIT"},
                        "mb": {"S": "w1"},
                        "mts": {"N": "1760000000100"},
                    }
                }
            ]
        },
    }
    assert tables.coordinator.read_migration() == V3
    other = dataclasses.replace(V3, modified_by="w2")
    assert not tables.coordinator.put_migration(other, replacing=None)
    assert not tables.coordinator.put_migration(
        other, replacing=dataclasses.replace(V3, client_version="CLIENT_VERSION_2X")
    )
