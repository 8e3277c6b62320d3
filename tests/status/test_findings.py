"""Faults of an application, and the one finding that each of them gives."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from kcl_pipeline.errors import (
    AccessDeniedError,
    NotFoundError,
    ThrottledError,
    UnavailableError,
    UnreadableRowError,
)
from kcl_pipeline.events import LossReason
from kcl_pipeline.leases.application import Loss, Losses, Pause
from kcl_pipeline.leases.coordinator import LeaderLock, UnreadableLock
from kcl_pipeline.leases.row import BadRow, Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.position import SHARD_END, Position
from kcl_pipeline.shards import MAX_HASH_KEY, HashKeyRange, StreamId
from kcl_pipeline.status.findings import ADVICE_ON_RUNS, CheckName, FindingLevel, findings_of, worst
from kcl_pipeline.status.limits import CheckLimits
from kcl_pipeline.status.snapshot import Failure, LifeObservation, RunProblem, Snapshot
from kcl_pipeline.worker_status import (
    HungState,
    LeaseLag,
    PausedLease,
    StalledLease,
    UnavailableStream,
    WorkerStatus,
    WorkerTotals,
)

NOON = 1_800_000_000.0
MIDDLE = MAX_HASH_KEY // 2
HOUR = 3_600_000


def lease(number: int, owner: str | None, **changes: object) -> Lease:
    ends = (0, MIDDLE) if number % 2 == 0 else (MIDDLE + 1, MAX_HASH_KEY)
    return Lease(
        f"shardId-{number}",
        Position(str(100 + number)),
        owner=owner,
        hash_key_range=HashKeyRange(*ends),
    ).with_(**changes)


def worker(name: str, *, ago: float = 2.0, **status: object) -> WorkerMetrics:
    lags = status.pop("lags", (LeaseLag(f"shardId-{name[-1]}", 900),))
    return WorkerMetrics(
        name,
        int(NOON - ago),
        {"C": (40.0,)},
        {"C": (90,)},
        run_id=f"run-{name}",
        status=WorkerStatus(lag_millis=lags[0].millis if lags else None, lags=lags, **status),
    )


OBSERVED = LifeObservation(11.0, 10.0)
HEALTHY = Snapshot(
    application="orders",
    at=NOON,
    streams=("orders",),
    leases=(lease(0, "w-0"), lease(1, "w-1")),
    workers=(worker("w-0"), worker("w-1")),
    lock=LeaderLock("w-0", 30_000, "v7"),
    observed=OBSERVED,
    unavailable=(),
    resolved=(StreamId("orders", retention_hours=24),),
    listed=frozenset({"shardId-0", "shardId-1"}),
    dead_letters=0,
)
LATE = (LeaseLag("shardId-1", 90_000),)
LOSS = Loss(shard="shardId-1", reason=LossReason.LEFT_RETENTION, reporter="w-1", recorded_millis=1)
RESTORED = replace(LOSS, reason=LossReason.TABLE_RESTORED, restored=("t-1", 58))


@dataclass(frozen=True)
class Fault:
    """A change of the healthy state, and the finding that it gives."""

    name: str
    check: CheckName
    level: FindingLevel
    says: str
    changes: dict[str, object]


def with_worker(row: WorkerMetrics) -> dict[str, object]:
    return {"workers": (worker("w-0"), row)}


def failed(part: str, error: Exception) -> dict[str, object]:
    return {"failures": (Failure(part, error),)}


FAULTS = [
    Fault(
        "worker_hung",
        CheckName.WORKERS,
        FindingLevel.PROBLEM,
        "w-1, has been in step writing for 20 min while records of 3 leases wait",
        with_worker(worker("w-1", hung=HungState("writing", 1_200.0, 3))),
    ),
    Fault(
        "batches_refused",
        CheckName.WORKERS,
        FindingLevel.PROBLEM,
        "the sink refused the last 1 batch of w-1: SinkError: denied",
        with_worker(worker("w-1", failed_batches=1, failure="SinkError: denied")),
    ),
    Fault(
        "cpu_not_measured",
        CheckName.WORKERS,
        FindingLevel.PROBLEM,
        "cannot measure their CPU and get no leases: w-1",
        with_worker(replace(worker("w-1"), stats={"C": (40.0, -1.0)})),
    ),
    Fault(
        "worker_id_shared",
        CheckName.WORKERS,
        FindingLevel.WARNING,
        "1 worker id has been used by two processes; the last, w-1: host-a:7@1 ended 20 s ago "
        "because another process started, and run-w-1 has the id",
        with_worker(
            replace(
                worker("w-1"),
                former_run_id="host-a:7@1",
                former_ended_millis=int((NOON - 20) * 1000),
            )
        ),
    ),
    *(
        Fault(
            name,
            CheckName.WORKERS,
            FindingLevel.WARNING,
            "2 runs of workers",
            {"run_problems": (RunProblem(name, "2 runs of workers"),)},
        )
        for name in ADVICE_ON_RUNS
    ),
    Fault(
        "shard_paused",
        CheckName.MOVING,
        FindingLevel.PROBLEM,
        "1 shard is paused: shardId-1 of worker w-1 for 40 s, 16 of 16 records fail",
        with_worker(
            worker(
                "w-1",
                paused=(PausedLease("shardId-1", "16 of 16 records fail", 40.0),),
                paused_leases=1,
            )
        ),
    ),
    Fault(
        "shard_stalled",
        CheckName.MOVING,
        FindingLevel.PROBLEM,
        "1 shard has not moved: shardId-1 of worker w-1 for 2 min",
        with_worker(
            worker(
                "w-1",
                stalled=(StalledLease("shardId-1", "reading", 130.0, "no body"),),
                stalled_leases=1,
            )
        ),
    ),
    Fault(
        "shard_stalled",
        CheckName.MOVING,
        FindingLevel.PROBLEM,
        "in the step reading: ThrottledError: rate exceeded",
        with_worker(
            worker(
                "w-1",
                stalled=(
                    StalledLease("shardId-1", "reading", 130.0, "ThrottledError: rate exceeded"),
                ),
                stalled_leases=1,
            )
        ),
    ),
    Fault(
        "application_paused",
        CheckName.MOVING,
        FindingLevel.WARNING,
        "the application is paused by me@host: repair",
        {"pause": Pause("me@host", None, "repair")},
    ),
    Fault(
        "lease_without_worker",
        CheckName.MOVING,
        FindingLevel.PROBLEM,
        "1 lease without a live worker (not renewed for 11 s): shardId-1 of none",
        {
            "leases": (lease(0, "w-0"), lease(1, None)),
            "observed": replace(OBSERVED, waits={"shardId-1": 11.0}),
        },
    ),
    Fault(
        "lease_without_worker",
        CheckName.MOVING,
        FindingLevel.PROBLEM,
        "shardId-1 of w-1",
        {"observed": replace(OBSERVED, waits={"shardId-1": 11.0})},
    ),
    Fault(
        "row_unreadable",
        CheckName.COVERED,
        FindingLevel.PROBLEM,
        "1 row cannot be parsed: table orders: the row shardId-9 has no checkpoint",
        {"bad_rows": (BadRow("orders", "shardId-9", "the row shardId-9 has no checkpoint"),)},
    ),
    Fault(
        "stream_unavailable",
        CheckName.COVERED,
        FindingLevel.PROBLEM,
        "1 stream is not read: clicks: it does not exist",
        {"unavailable": (UnavailableStream("clicks", "it does not exist."),)},
    ),
    Fault(
        "hash_keys_uncovered",
        CheckName.COVERED,
        FindingLevel.PROBLEM,
        "orders: no lease covers the hash keys 0 to",
        {"leases": (lease(1, "w-1"),), "workers": (worker("w-1"),)},
    ),
    Fault(
        "hash_keys_uncovered",
        CheckName.COVERED,
        FindingLevel.PROBLEM,
        "clicks: no lease at all",
        {
            "streams": ("orders", "clicks"),
            "leases": tuple(
                replace(le, lease_key=f"1:orders:2:{le.lease_key}", stream="1:orders:2")
                for le in HEALTHY.leases
            ),
            "listed": None,
            "resolved": (),
        },
    ),
    Fault(
        "shard_gone",
        CheckName.COVERED,
        FindingLevel.WARNING,
        "no longer lists: shardId-1",
        {"listed": frozenset({"shardId-0"})},
    ),
    Fault(
        "records_lost",
        CheckName.LOSSES,
        FindingLevel.PROBLEM,
        "1 loss of records, 0 acknowledged; the last: shardId-1 (left_retention)",
        {"losses": Losses(count=1, last=LOSS)},
    ),
    Fault(
        "table_restored",
        CheckName.LOSSES,
        FindingLevel.PROBLEM,
        "rows after it are gone and are not read again",
        {"losses": Losses(count=1, last=RESTORED)},
    ),
    Fault(
        "no_leader",
        CheckName.LEADER,
        FindingLevel.PROBLEM,
        "there is no leader",
        {"lock": LeaderLock("w-0", 30_000, "v7", is_released=True)},
    ),
    Fault(
        "no_leader",
        CheckName.LEADER,
        FindingLevel.WARNING,
        "w-0 has not renewed the leader lock for 11 s",
        {"observed": replace(OBSERVED, leader_absent=11.0)},
    ),
    Fault(
        "no_leader",
        CheckName.LEADER,
        FindingLevel.PROBLEM,
        "w-0 has not renewed the leader lock for 61 s",
        {"observed": replace(OBSERVED, leader_absent=61.0, goes_on=True)},
    ),
    Fault(
        "lock_unreadable",
        CheckName.LEADER,
        FindingLevel.PROBLEM,
        "the leader lock cannot be parsed: it has no owner",
        {"lock": UnreadableLock("it has no owner", {})},
    ),
    Fault(
        "lag",
        CheckName.LAG,
        FindingLevel.WARNING,
        "90.0 s behind the end of the stream, reported 2 s ago. shardId-1 of worker w-1 lags most",
        with_worker(worker("w-1", lags=LATE)),
    ),
    Fault(
        "lag",
        CheckName.LAG,
        FindingLevel.PROBLEM,
        "its worker has committed no batch for 16 min: a batch takes long or is repeated",
        with_worker(
            worker(
                "w-1", lags=(LeaseLag("shardId-1", 950_000),), totals=WorkerTotals(seconds=951.0)
            )
        ),
    ),
    Fault(
        "dead_letters",
        CheckName.DEAD_LETTERS,
        FindingLevel.WARNING,
        "3 records became dead letters in the last hour",
        {"dead_letters": 3},
    ),
    Fault(
        "no_permission",
        CheckName.COVERED,
        FindingLevel.PROBLEM,
        "the leases cannot be read: not authorized",
        failed("the leases", AccessDeniedError("not authorized", operation="Scan")),
    ),
    Fault(
        "throttled",
        CheckName.WORKERS,
        FindingLevel.PROBLEM,
        "the worker metrics cannot be read: rate exceeded",
        failed("the worker metrics", ThrottledError("rate exceeded")),
    ),
    Fault(
        "record_unreadable",
        CheckName.LOSSES,
        FindingLevel.PROBLEM,
        "the record of losses cannot be read: kclpLosses is no record",
        failed("the record of losses", UnreadableRowError("kclpLosses is no record")),
    ),
    Fault(
        "table_missing",
        CheckName.LEADER,
        FindingLevel.WARNING,
        "the leader lock cannot be read: there is no table yet",
        failed("the leader lock", NotFoundError("no such table")),
    ),
    Fault(
        "not_read",
        CheckName.COVERED,
        FindingLevel.PROBLEM,
        "the pause cannot be read: timed out",
        failed("the pause", UnavailableError("timed out")),
    ),
]


def faults_of(snapshot: Snapshot) -> list[tuple[str, CheckName | None, FindingLevel, str]]:
    found = findings_of(snapshot, CheckLimits())
    return [(one.name, one.check, one.level, one.sentence) for one in found if one.is_fault]


def test_a_healthy_application_has_one_finding_per_check_and_no_fault():
    found = findings_of(HEALTHY, CheckLimits())
    assert [one.check for one in found] == list(CheckName)
    assert {one.level for one in found} == {FindingLevel.OK}
    assert all(one.name == one.check.value and not one.advice for one in found)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.name}-{fault.says[:20]}")
def test_a_fault_is_one_finding_with_advice(fault: Fault):
    faults = faults_of(replace(HEALTHY, **fault.changes))
    matching = [one for one in faults if one[0] == fault.name]
    assert [one[:3] for one in matching] == [(fault.name, fault.check, fault.level)], faults
    assert fault.says in matching[0][3]
    found = findings_of(replace(HEALTHY, **fault.changes), CheckLimits())
    assert all(one.advice for one in found if one.is_fault)
    assert worst(found, fault.check).level is fault.level
    assert {one.check for one in found} == set(CheckName), "the other checks say something, too"


def test_there_are_at_most_eight_checks():
    assert len(CheckName) <= 8


def test_a_checkpoint_that_stands_still_while_old_records_wait_is_a_finding():
    late = worker("w-1", lags=(LeaseLag("shardId-1", 2 * HOUR),))
    still = replace(OBSERVED, unchanged={"shardId-1": 11.0})
    found = faults_of(replace(HEALTHY, workers=(worker("w-0"), late), observed=still))
    assert [name for name, *_ in found] == ["lag", "checkpoint_still"]
    moving = replace(HEALTHY, workers=(worker("w-0"), late))
    assert [name for name, *_ in faults_of(moving)] == ["lag"], "it moves: it is only late"


def test_records_that_leave_retention_soon_are_a_problem():
    at_end = worker("w-1", lags=(LeaseLag("shardId-1", 22 * HOUR),))
    found = findings_of(replace(HEALTHY, workers=(worker("w-0"), at_end)), CheckLimits())
    short = worst(found, CheckName.RETENTION)
    assert (short.name, short.level) == ("retention_short", FindingLevel.PROBLEM)
    assert short.sentence.startswith(
        "orders: 2.0 h until records are lost; its oldest unread record is at most 22.0 h old, of"
    )
    assert short.numbers == {"hours_left": 2.0}


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        ("it is paused: broken", {"paused": (PausedLease("shardId-1", "broken", 9.0),)}),
        ("its worker is hung in step writing for 9 min", {"hung": HungState("writing", 540.0, 1)}),
        ("the table refuses the batches", {"failed_batches": 3, "failure": "no"}),
        ("its worker commits less than arrives, as on 1 of 2 shards", {}),
    ],
)
def test_the_lag_says_why_the_worst_shard_lags(cause: str, changes: dict[str, object]):
    found = findings_of(
        replace(HEALTHY, workers=(worker("w-0"), worker("w-1", lags=LATE, **changes))),
        CheckLimits(),
    )
    assert cause in worst(found, CheckName.LAG).sentence


def test_one_look_says_ages_by_the_clocks_of_their_writers():
    """A single look cannot tell a dead worker from one whose clock is behind."""
    silent = replace(HEALTHY, workers=(worker("w-0"), worker("w-1", ago=300.0)), observed=None)
    found = {name: (level, text) for name, _, level, text in faults_of(silent)}
    assert found["worker_silent"] == (
        FindingLevel.WARNING,
        "1 worker has not reported (by their own clocks): w-1 for 5 min",
    )
    level, text = found["lease_without_worker"]
    assert (level, "by the clocks of its writers" in text) == (FindingLevel.WARNING, True)


def test_two_looks_do_not_believe_the_clock_in_a_row():
    behind = replace(HEALTHY, workers=(worker("w-0"), worker("w-1", ago=300.0)))
    assert faults_of(behind) == [], "it has written its row in between"
    dead = replace(HEALTHY, observed=replace(OBSERVED, silent={"w-1": 11.0}))
    assert [name for name, *_ in faults_of(dead)] == ["worker_silent"]


def test_what_a_dead_worker_left_in_its_row_is_not_believed():
    dead = worker("w-1", hung=HungState("writing", 900.0, 1), paused_leases=1)
    observed = replace(OBSERVED, silent={"w-1": 11.0}, waits={"shardId-1": 11.0})
    found = faults_of(replace(HEALTHY, workers=(worker("w-0"), dead), observed=observed))
    assert {name for name, *_ in found} == {"lease_without_worker", "worker_silent"}


def test_an_ended_shard_needs_nobody():
    ended = lease(2, None, checkpoint=SHARD_END)
    assert faults_of(replace(HEALTHY, leases=(*HEALTHY.leases, ended))) == []


def test_an_application_that_has_not_begun_says_what_is_true():
    empty = Snapshot(application="orders", at=NOON, streams=("orders",), observed=OBSERVED)
    found = {one.check: one.sentence for one in findings_of(empty, CheckLimits())}
    assert found == {
        CheckName.LAG: "no running worker has reported its lag",
        CheckName.MOVING: "no shard yet",
        CheckName.RETENTION: "the age of unread records is not known",
        CheckName.LOSSES: "no loss of records is recorded",
        CheckName.DEAD_LETTERS: "no worker reports how many records failed",
        CheckName.COVERED: "there are no leases yet",
        CheckName.WORKERS: "no worker reports",
        CheckName.LEADER: "there is no leader",
    }
    # A worker has created the leases, and its Spark session starts. Dagster knows its run.
    waits = LifeObservation(1.0, 10.0, waits={"shardId-0": 1.0}, goes_on=True)
    leases = (lease(0, None, hash_key_range=HashKeyRange(0, MAX_HASH_KEY)),)
    starting = replace(empty, leases=leases, observed=waits, starting=1, lock=HEALTHY.lock)
    assert faults_of(starting) == []
    found = {one.check: one.sentence for one in findings_of(starting, CheckLimits())}
    assert found[CheckName.WORKERS] == "no worker reports yet, 1 is starting"
    assert found[CheckName.MOVING] == "1 of 1 shard waits for a worker"
    assert found[CheckName.COVERED] == "1 lease covers all hash keys of 1 stream"


def test_an_application_without_anything_waits_for_its_first_worker():
    empty = Snapshot(application="orders", at=NOON, streams=("orders",))
    levels = {name: level for name, _, level, _ in faults_of(empty)}
    assert levels == {"no_leases": FindingLevel.WARNING, "no_leader": FindingLevel.WARNING}


@pytest.mark.parametrize("observed", [None, OBSERVED])
def test_a_shard_that_stands_still_is_never_without_a_fault(observed: LifeObservation | None):
    """Each way in which a shard can stand still, also when only one look was taken."""
    makes: list[Callable[[Snapshot], Snapshot]] = [
        lambda s: replace(s, pause=Pause("me")),
        lambda s: replace(s, leases=(s.leases[0], s.leases[1].with_(owner=None))),
        lambda s: replace(s, workers=(s.workers[0],)),
        lambda s: replace(s, workers=(s.workers[0], worker("w-1", stalled_leases=1))),
        lambda s: replace(s, workers=(s.workers[0], worker("w-1", paused_leases=1))),
        lambda s: replace(s, workers=(s.workers[0], worker("w-1", hung=HungState("x", 9.0, 1)))),
        lambda s: replace(s, workers=(s.workers[0], worker("w-1", lags=LATE))),
    ]
    for make in makes:
        changed = make(replace(HEALTHY, observed=observed))
        waits = dict.fromkeys(changed.unowned, 11.0)
        if observed is not None:
            changed = replace(changed, observed=replace(observed, waits=waits))
        assert faults_of(changed), changed
