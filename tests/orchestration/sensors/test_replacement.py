"""Workers are replaced one by one: at the end of their time, and after a deploy."""

from __future__ import annotations

import dagster as dg
import pytest
from dagster import DagsterRunStatus as S

from kcl_pipeline.leases.row import Lease
from kcl_pipeline.orchestration.runs import RunView
from kcl_pipeline.orchestration.supervision import (
    STAGGER,
    TAKE_OVER_SECONDS,
    Code,
    CountedWorkers,
    Failed,
    Step,
    replace,
)
from kcl_pipeline.position import LATEST, SHARD_END
from kcl_pipeline.worker_status import PausedLease, WorkerStatus, WorkerTotals
from tests.support.dagster_fakes import worker
from tests.support.replaced_fleet import Fleet, fleet_fixture  # noqa: F401 (fixture)
from tests.support.sensor_stage import instance_fixture  # noqa: F401 (fixture)

NOW = 1_000_000.0
NEW = Code("new")
ORDER = ["start two", "end one", "start two", "end one"]


def view(name: str, status: S = S.STARTED, *, age: float = 100.0, **fields) -> RunView:
    """A run; `o...` has the old version, `n...` the new one."""
    version = "new" if name.startswith("n") else "old"
    started = None if status in (S.QUEUED, S.STARTING) else NOW - age
    fields = {"created": NOW - age - 5, "started": started, "version": version, **fields}
    return RunView(name, status, f"w-{name}", continuous=True, **fields)


SUCCESSOR = view("n3", replaces="w-o1", age=20)
OTHERS = (view("o1"), view("o2", age=50))


def status(
    read: int = 0, batches: int = 1, seconds: float = 20, dead_letters: int = 0, **fields
) -> WorkerStatus:
    totals = WorkerTotals(seconds=seconds, batches=batches, dead_letters=dead_letters)
    return WorkerStatus(read_leases=read, totals=totals, **fields)


def step(
    *runs: RunView,
    leases: dict[str, str] | None = None,
    rows: dict[str, WorkerStatus] | None = None,
    drained: tuple[str, ...] = (),
    without_row: tuple[str, ...] = (),
    recent: tuple[RunView, ...] = (),
    code: Code = NEW,
    **given,
) -> Step:
    """The next step.

    Args:
        runs: The active runs. A started one has a row that moves, unless `without_row` has it.
        leases: Owners by lease key; an owner `a>b` is a handoff.
        rows: The status in the row by worker id.
        drained: Workers that were asked to end.
    """
    moving = {
        run.worker_id
        for run in runs
        if run.status in (S.STARTED, S.CANCELING) and run.worker_id not in without_row
    }
    table = []
    for key, owners in (leases or {}).items():
        former, _, owner = owners.rpartition(">")
        table.append(Lease(key, LATEST, owner=owner, checkpoint_owner=former or None))
    table.append(Lease("ended", SHARD_END, owner="w-o1"))
    counted = CountedWorkers(
        {run.worker_id: run for run in runs},
        frozenset(moving),
        {
            key: worker(key, status=(rows or {}).get(key), drain_requested=key in drained)
            for key in moving
        },
    )
    given = {"failed": None, "paused_before": 0, "now": NOW, **given}
    return replace(counted, recent, table, code, given.pop("failed"), **given)


def test_nothing_happens_while_no_worker_is_due():
    assert step(view("n1"), view("n2")) == Step()
    assert step(*OTHERS, code=Code(None)) == Step(), "the version is not known"
    assert step(*OTHERS, code=Code("new", replaces_versions=False)) == Step()


def test_the_successor_of_the_oldest_worker_starts_first():
    assert step(*OTHERS).start == "w-o1"
    assert "replacing 2 workers by version new" in (step(*OTHERS).text or "")


@pytest.mark.parametrize("state", [S.QUEUED, S.NOT_STARTED, S.STARTING])
def test_a_successor_that_is_queued_or_starts_ends_nobody(state):
    found = step(*OTHERS, view("n3", state, replaces="w-o1"))
    assert (found.start, found.drain) == (None, ())
    assert ("it is queued" if state is S.QUEUED else "it is starting") in (found.text or "")
    assert step(*OTHERS, SUCCESSOR, without_row=("w-n3",)).drain == ()


@pytest.mark.parametrize(
    ("leases", "row", "ends"),
    [
        ({"a": "w-o1", "b": "w-n3"}, status(read=1), False),
        ({"a": "w-o1>w-n3", "b": "w-n3"}, status(read=1), False),
        ({"a": "w-o2>w-o1", "b": "w-n3"}, status(read=1), False),
        ({"a": "w-n3", "b": "w-n3"}, status(read=1), False),
        ({"a": "w-n3", "b": "w-n3"}, status(read=2), True),
        ({"a": "w-n3"}, None, False),
        ({"a": "w-n3"}, status(read=1, batches=0, lag_millis=900), False),
        ({"a": "w-n3"}, status(read=1, batches=0, lag_millis=0), True),
        ({"a": "w-n3"}, status(read=1, failed_batches=1), False),
        ({"a": "w-o2"}, status(batches=0), True),
        ({}, status(batches=0), True),
    ],
)
def test_a_worker_ends_after_its_successor_has_read_each_shard(leases, row, ends):
    rows = {} if row is None else {"w-n3": row}
    found = step(*OTHERS, SUCCESSOR, leases=leases, rows=rows)
    assert found.drain == (("w-o1",) if ends else ())
    assert found.start is None


def test_a_java_leader_moves_nothing_so_the_leases_are_given_at_the_end():
    rows = {"w-n3": status(read=1)}
    kept = {"a": "w-o1", "b": "w-n3"}
    found = step(*OTHERS, SUCCESSOR, leases=kept, rows=rows, follows_succession=False)
    assert found.drain == ("w-o1",)


def test_only_one_worker_is_replaced_at_a_time():
    rows = {"w-n3": status()}
    ending = step(*OTHERS, SUCCESSOR, rows=rows, drained=("w-o1",))
    assert (ending.start, ending.drain) == (None, ())
    assert "which is ending" in (ending.text or "")
    after = step(OTHERS[1], SUCCESSOR, drained=("w-o2",))
    assert (after.start, after.drain) == (None, ())
    assert step(*OTHERS, view("n4", S.STARTING)).start is None, "a worker starts"
    assert step(OTHERS[1], SUCCESSOR).start == "w-o2"
    assert step(*OTHERS, drained=("w-o1",)).start is None, "one is ending"


def test_a_worker_that_is_gone_is_not_waited_for():
    assert step(OTHERS[1], SUCCESSOR, view("o1"), without_row=("w-o1",)).start is None
    assert step(view("n2"), SUCCESSOR) == Step()


def paused(number: int = 1) -> WorkerStatus:
    lease = PausedLease("s-0", "ValueError: x", 1.0)
    return status(read=1, batches=0, paused=(lease,) * number, paused_leases=number, dead_letters=7)


def test_a_successor_that_pauses_shards_ends_and_its_version_replaces_no_more():
    found = step(*OTHERS, SUCCESSOR, leases={"a": "w-n3"}, rows={"w-n3": paused()})
    assert (found.drain, found.start) == (("w-n3",), None)
    assert found.failed is not None
    assert found.failed.sentence("kcl-pipeline do replay") == (
        "version new replaces no more workers: worker w-n3 has paused 1 shard: ValueError: x; "
        "workers of version old go on; 7 records became dead letters meanwhile; after a "
        "correction, `kcl-pipeline do replay` reads them again"
    )
    after = step(*OTHERS, failed=found.failed)
    assert (after.start, after.drain, after.failed) == (None, (), found.failed)
    assert step(*OTHERS, failed=found.failed, code=Code("newer")).start == "w-o1"


def test_a_shard_that_was_paused_before_is_no_fault_of_the_successor():
    rows = {"w-n3": paused()}
    found = step(*OTHERS, SUCCESSOR, leases={"a": "w-n3"}, rows=rows, paused_before=1)
    assert (found.drain, found.failed) == (("w-o1",), None)


def test_a_new_worker_that_pauses_shards_later_stops_the_rollout():
    found = step(OTHERS[1], SUCCESSOR, rows={"w-n3": paused()})
    assert (found.drain, found.start) == (("w-n3",), None)
    both = step(OTHERS[1], SUCCESSOR, rows={"w-n3": paused(), "w-o2": paused()})
    assert (both.drain, both.start) == ((), "w-o2"), "the old version pauses them, too"


def test_a_successor_that_cannot_read_ends_after_ten_minutes():
    late = TAKE_OVER_SECONDS + 1
    waiting = {"leases": {"a": "w-n3"}, "rows": {"w-n3": status(seconds=late)}}
    found = step(*OTHERS, SUCCESSOR, **waiting)
    assert found.drain == ("w-n3",)
    assert found.failed is not None
    assert found.failed.reason == "worker w-n3 has not read 1 shard yet for 10 min"
    assert step(*OTHERS, SUCCESSOR, **waiting, batch_seconds=60).drain == ()


def test_three_runs_that_fail_stop_a_version_and_one_that_lives_does_not():
    dead = tuple(
        view(f"n{i}", S.FAILURE, created=NOW - 400 + i, ended=NOW - 350) for i in (3, 4, 5)
    )
    found = step(*OTHERS, recent=dead)
    assert (found.start, found.drain) == (None, ())
    assert found.failed is not None
    assert "its last 3 runs failed" in found.failed.sentence("")
    assert step(*OTHERS, recent=dead[:2]).start == "w-o1"


def test_the_time_of_a_worker_is_staggered_by_its_id():
    code = Code(None, run_seconds=1_000.0)
    runs = [view(f"{i:032x}", age=1_000 - i) for i in range(200)]
    assert code.is_over(runs[0], NOW)
    assert not any(code.is_over(run, NOW - 1_000 * STAGGER - 1) for run in runs)
    first = RunView("f" * 32, S.STARTED, "w", continuous=True, started=NOW - 901)
    assert code.is_over(first, NOW)
    assert not Code(None).is_over(first, NOW), "without an end"
    assert not Code(None, "east", 10.0).is_over(view("o1", location="west"), NOW)


def test_after_a_failed_successor_of_the_same_version_the_next_one_waits_for_an_hour():
    code = Code("old", run_seconds=50.0)
    failed = Failed(version="old", former="old", reason="worker w-3 has paused 1 shard", at=NOW)
    found = step(view("o1"), failed=failed, code=code, now=NOW + 3_599)
    assert (found.start, found.failed) == (None, failed)
    assert failed.sentence("") == (
        "the replacement of workers whose time is over has stopped: worker w-3 has paused 1 shard"
    )
    assert step(view("o1"), failed=failed, code=code, now=NOW + 3_600).start == "w-o1"


# A sensor with its cursor, and runs and workers that follow it


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_deploy_replaces_every_worker_after_its_successor_reads(fleet, is_busy):
    fleet.is_busy = is_busy
    texts = [result.cursor or "" for result in fleet.settle(ORDER, within=40)]
    assert (fleet.versions(), fleet.most) == (["two", "two"], 3)
    assert sorted(fleet.owners().values()) == [2, 2]
    assert fleet.moves == 4, "each lease moves once"
    assert any("replacing 2 workers by version two" in text for text in texts)
    assert "repla" not in texts[-1]


def test_in_a_leaderless_application_the_leases_are_free_when_the_former_worker_ends(instance):
    fleet = Fleet(instance, settings={"coordination": "leaderless"})
    fleet.follows = False
    for _ in range(10):
        fleet.tick()
    fleet.log.clear()
    fleet.deploy("two")
    order = ["start two", "end one with 2", "start two", "end one with 2"]
    texts = [result.cursor or "" for result in fleet.settle(order, within=150)]
    assert sorted(fleet.owners().values()) == [2, 2]
    assert not any("replaces no more" in text for text in texts)


def test_the_same_code_replaces_nothing(fleet):
    fleet.deploy("one")
    for _ in range(20):
        fleet.tick()
    assert fleet.log == []


@pytest.mark.parametrize(
    "restart",
    [pytest.param(at, marks=() if at in (3, 9) else (pytest.mark.long,)) for at in range(1, 16)],
)
def test_a_sensor_that_restarts_in_the_middle_continues(fleet, restart):
    for _ in range(restart):
        fleet.tick()
    fleet.deploy("two")
    fleet.stage.cursor = '{"open_shards": 8}'
    fleet.settle(ORDER, within=50)
    assert (fleet.versions(), fleet.most) == (["two", "two"], 3)


def test_a_broken_version_costs_one_worker_and_the_old_ones_go_on(fleet):
    fleet.broken.add("two")
    results = fleet.settle(["start two", "end two with 2"], within=60)
    assert fleet.versions() == ["one", "one"]
    assert sorted(fleet.owners().values()) == [2, 2]
    (ended,) = fleet.instance.get_runs(dg.RunsFilter(statuses=[S.FAILURE]))
    assert ended.tags["kcl/version"] == "two"
    sentence = results[-1].skip_reason.skip_message
    assert "version two replaces no more workers: worker orders_eu-" in sentence
    assert "has paused 1 shard: ValueError: x; workers of version one go on" in sentence
    assert "5 records became dead letters meanwhile" in sentence
    assert "kcl-pipeline do replay" in sentence
    checks = [
        event
        for result in results
        for event in result.asset_events
        if isinstance(event, dg.AssetCheckEvaluation) and event.check_name == "workers_running"
    ]
    assert not checks[-1].passed
    assert "version two replaces no more workers" in checks[-1].description
    fleet.log.clear()
    fleet.deploy("three")
    fleet.settle(["start three", "end one", "start three", "end one"], within=40)


def test_runs_that_fail_at_once_stop_a_version(fleet):
    results = fleet.settle(["start two"] * 3, within=80, fails=True)
    assert fleet.versions() == ["one", "one"]
    sentence = results[-1].skip_reason.skip_message
    assert "version two replaces no more workers: its last 3 runs failed" in sentence


def test_no_worker_of_a_failed_version_fills_a_gap_while_an_old_one_runs(fleet):
    fleet.broken.add("two")
    fleet.settle(["start two", "end two with 2"], within=30)
    fleet.log.clear()
    fleet.kill(fleet.alive[0])
    for _ in range(30):
        fleet.tick()
    assert fleet.log == ["kill one"]
    fleet.kill(fleet.alive[0])
    for _ in range(30):
        if len(fleet.log) < 3:
            fleet.tick()
    assert fleet.log[:3] == ["kill one", "kill one", "start two"]


def test_a_queue_that_holds_the_successor_back_ends_nobody(fleet):
    results = [fleet.tick(status=S.QUEUED) for _ in range(30)]
    assert fleet.log == ["start two"]
    assert fleet.versions() == ["one", "one"]
    assert "it is queued" in results[-1].cursor
    assert "been queued for up to" in results[-1].cursor


def test_a_successor_that_is_killed_gives_its_place_to_another_one(fleet):
    while len(fleet.alive) < 3:
        fleet.tick()
    fleet.kill(fleet.alive[-1])
    fleet.settle(["start two", "kill two", *ORDER], within=80)
    assert fleet.most == 3
    assert sorted(fleet.owners().values()) == [2, 2]


def test_a_worker_that_is_killed_while_it_is_replaced_has_its_successor(fleet):
    while len(fleet.alive) < 3:
        fleet.tick()
    former = fleet.alive[-1].tags["kcl/replaces"]
    fleet.kill(next(run for run in fleet.alive if fleet.stage.worker_of(run) == former))
    fleet.settle(["start two", "kill one", "start two", "end one"], within=60)
    assert fleet.most == 3


def test_workers_without_a_run_are_counted_by_their_rows(instance):
    """As those of Kubernetes, of a shell, or of Java: they are neither replaced nor drained."""
    fleet = Fleet(instance, min=3, max=3)
    fleet.stage.workers.rows["java"] = worker("java")
    fleet.stage.workers.rows["gone"] = worker("gone")
    for tick in range(20):
        fleet.stage.workers.beat("java")
        fleet.tick()
        if tick == 3:
            assert fleet.log == ["start one"], "a row that never moved counts for 30 s"
    assert fleet.log == ["start one", "start one"]
    assert "1 worker without a run here" in (fleet.stage.cursor or "")


@pytest.mark.parametrize(("workers", "is_busy"), [(1, True), (6, False)])
@pytest.mark.parametrize("generations", [3, pytest.param(10, marks=pytest.mark.long)])
def test_bounded_runs_follow_each_other(instance, is_busy, workers, generations):
    """Run hours of three minutes, also with more workers than the four shards."""
    fleet = Fleet(instance, min=workers, max=workers, run_hours=0.05, rolling_replacement=False)
    fleet.is_busy = is_busy
    fleet.stage.cursor = '{"open_shards": 4}'
    for _ in range(36 * generations):
        fleet.tick()
    workers = min(workers, 4)
    starts = fleet.log.count("start one")
    assert len(fleet.alive) in (workers, workers + 1)
    assert fleet.most <= workers + 1
    assert fleet.log.count("end one") == starts - len(fleet.alive)
    assert not any("with" in entry for entry in fleet.log), "nobody ends with a lease"
    slack = max(1, generations // 5)
    assert (generations - slack) * workers <= starts <= (generations + slack) * workers
    assert fleet.moves <= 4 * (generations + slack)
    runs = instance.get_runs(dg.RunsFilter(statuses=[S.FAILURE, S.CANCELED]))
    assert runs == []
