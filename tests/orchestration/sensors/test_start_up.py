"""How many runs are on the way at once, and never more of them than open shards."""

from __future__ import annotations

import pytest
from dagster import DagsterRunStatus as S
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.orchestration.runs import ACTIVE, RunView
from kcl_pipeline.orchestration.supervision import (
    FEWER_SHARDS_AFTER_SECONDS,
    AutoscalerMemory,
    decide,
    open_shards,
)
from kcl_pipeline.position import SHARD_END
from tests.support.dagster_fakes import (
    FakeCycle,
    FakeFleet,
    FakePipeline,
    counted,
    leases,
    led,
    worker,
)
from tests.support.sensor_stage import (  # noqa: F401 (fixtures)
    Stage,
    instance_fixture,
)

NOW = 1_000_000.0


def runs(*statuses: S) -> list[RunView]:
    return [
        RunView(
            f"r-{i}", status, f"w-{i}", continuous=True, created=NOW - 500 + i, started=NOW - 400
        )
        for i, status in enumerate(statuses)
    ]


def decided(active, memory=None, *, shards=8, ready=None, starting=2, now=NOW, fleet=(4, 8)):
    memory = memory or AutoscalerMemory()
    return decide(
        counted(active, ready),
        [],
        memory,
        minimum=fleet[0],
        maximum=fleet[1],
        now=now,
        shards=shards,
        max_starting=starting,
    )


@pytest.mark.parametrize(
    ("statuses", "ready", "started"),
    [
        ([], set(), 2),
        ([S.QUEUED], set(), 1),
        ([S.QUEUED, S.STARTING], set(), 0),
        ([S.STARTED, S.NOT_STARTED], {"w-0"}, 1),
        ([S.STARTED, S.STARTED], {"w-0"}, 1),
        ([S.STARTED, S.STARTED], {"w-0", "w-1"}, 2),
        ([S.STARTED, S.STARTED, S.STARTED], {"w-0", "w-1", "w-2"}, 1),
        ([S.STARTED, S.CANCELING], {"w-0", "w-1"}, 2),
        ([S.STARTED, S.CANCELING], {"w-0"}, 2),
    ],
)
def test_only_so_many_runs_are_on_the_way(statuses, ready, started):
    assert decided(runs(*statuses), ready=ready).start == started


def test_there_are_no_more_workers_than_open_shards():
    assert decided([], shards=1).start == 1
    decision = decided(runs(S.STARTED, S.STARTED), shards=2)
    assert (decision.start, decision.drain, decision.memory.desired) == (0, (), 2)
    assert decided([], shards=0).start == 1, "a stream whose shards are all closed keeps one"


def test_one_worker_starts_while_the_number_of_shards_is_not_known():
    assert decided([], shards=None, starting=4).start == 1
    assert decided(runs(S.STARTED), shards=None, starting=4).start == 0
    known = AutoscalerMemory(open_shards=3)
    assert decided(runs(S.STARTED), known, shards=None, starting=4).start == 2


def test_fewer_shards_drain_workers_after_a_minute():
    memory = AutoscalerMemory(desired=4, open_shards=4)
    active = runs(S.STARTED, S.STARTED, S.STARTED, S.STARTED)
    first = decided(active, memory, shards=2)
    assert (first.drain, first.memory.fewer_since) == ((), NOW)
    assert decided(active, first.memory, shards=4).memory.fewer_since is None
    later = decided(active, first.memory, shards=2, now=NOW + FEWER_SHARDS_AFTER_SECONDS)
    assert (later.drain, later.memory.open_shards) == (("w-3", "w-2"), 2)
    again = decided(active, later.memory, shards=2, now=NOW + FEWER_SHARDS_AFTER_SECONDS + 5)
    assert again.drain == later.drain, "the request is repeated until the runs end"


def test_more_shards_count_at_once():
    memory = AutoscalerMemory(desired=1, open_shards=1)
    assert decided(runs(S.STARTED), memory, shards=4).start == 2


def test_a_child_counts_when_its_parents_are_finished():
    parent, left, right = leases(3, ["w"])
    children = [one.with_(parent_shard_ids=frozenset({parent.shard_id})) for one in (left, right)]
    assert open_shards([]) is None
    assert open_shards([parent, *children]) == 1
    assert open_shards([parent.with_(checkpoint=SHARD_END), *children]) == 2


@given(
    active=st.lists(st.sampled_from(sorted(ACTIVE, key=str)), max_size=10),
    known=st.none() | st.integers(0, 6),
    shards=st.none() | st.integers(0, 6),
    starting=st.integers(1, 6),
    minimum=st.integers(1, 6),
    ready=st.sets(st.sampled_from([f"w-{i}" for i in range(10)])),
)
def test_neither_limit_is_ever_exceeded(active, known, shards, starting, minimum, ready):
    views = runs(*active)
    decision = decided(
        views,
        AutoscalerMemory(open_shards=known),
        shards=shards,
        ready=ready,
        starting=starting,
        fleet=(minimum, 8),
    )
    on_the_way = [
        r
        for r in views
        if r.status is not S.CANCELING and not (r.status is S.STARTED and r.worker_id in ready)
    ]
    if decision.start:
        assert decision.start + len(on_the_way) <= max(starting, 1)
        counts = [n for n in (known, shards) if n is not None]
        # A run that is canceled and has no row has released its leases
        workers = [r for r in views if r.status is not S.CANCELING or r.worker_id in ready]
        assert len(workers) + decision.start <= max([1, *counts])


def test_the_sensor_counts_shards_and_workers_that_report(instance):
    pipeline = FakePipeline(
        workers=FakeFleet(min=4, max=8, max_starting=2),
        cycle=FakeCycle([led(leases(3, [None]), [worker("w")])]),
    )
    stage = Stage(instance, pipeline)
    stage.cursor = None
    assert len(stage().run_requests) == 2
    first, second = stage.run(), stage.run()
    assert not stage().run_requests
    stage.workers.beat(stage.worker_of(first))
    assert len(stage().run_requests) == 1, "three shards, and one more run on the way"
    stage.workers.beat(stage.worker_of(second))
    stage.run()
    assert not stage().run_requests
    assert stage.cursor is not None
    assert '"open_shards": 3' in stage.cursor


def test_before_the_leases_exist_one_worker_starts(instance):
    stage = Stage(instance, FakePipeline(workers=FakeFleet(min=4, max=8)))
    stage.cursor = None
    assert len(stage().run_requests) == 1
    stage.run()
    assert not stage().run_requests
