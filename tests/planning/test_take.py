"""Which leases a worker takes without a leader."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.leader.kcl2 import SeenLease, TakeLimits, Takings, leases_to_take

FAILOVER = 10.0
LIMITS = TakeLimits(FAILOVER)
FRESH, EXPIRED, VERY_OLD = 3.0, 11.0, 31.0


def held(**owners: int) -> list[SeenLease]:
    """Unexpired leases: so many of each owner."""
    return [
        SeenLease(f"{owner}-{number}", owner, FRESH)
        for owner, count in owners.items()
        for number in range(count)
    ]


def without_owner(number: int, age: float = FRESH, owner: str | None = None) -> list[SeenLease]:
    return [SeenLease(f"x-{n}", owner, age) for n in range(number)]


def take(leases: list[SeenLease], limits: TakeLimits = LIMITS, me: str = "me") -> Takings:
    return leases_to_take(me, leases, limits, Random(1))


@pytest.mark.parametrize(
    ("leases", "limits", "target", "number", "victims"),
    [
        pytest.param([], LIMITS, 0, 0, [], id="no leases"),
        pytest.param(held(me=3), LIMITS, 3, 0, [], id="alone, and has everything"),
        pytest.param(held(a=2, me=2), LIMITS, 2, 0, [], id="even"),
        pytest.param(held(a=4), LIMITS, 2, 1, ["a"], id="steals one at a time"),
        pytest.param(
            held(a=9),
            replace(LIMITS, max_leases_to_steal_at_one_time=3),
            5,
            3,
            ["a"],
            id="steals as many as the setting says",
        ),
        pytest.param(
            held(a=9),
            replace(LIMITS, max_leases_to_steal_at_one_time=100),
            5,
            4,
            ["a"],
            id="steals only what the other has above the target",
        ),
        pytest.param(held(a=5, b=2, me=1), LIMITS, 3, 1, ["a"], id="steals from the most loaded"),
        pytest.param(
            held(a=2, b=2, c=2), LIMITS, 2, 1, ["a", "b", "c"], id="needs two: one from the target"
        ),
        pytest.param(held(a=2, b=2, me=1), LIMITS, 2, 0, [], id="needs one: none from the target"),
        pytest.param(held(a=1, b=1), LIMITS, 1, 0, [], id="more workers than leases"),
        pytest.param(
            held(a=3) + without_owner(1), LIMITS, 2, 1, [None], id="a free lease comes first"
        ),
        pytest.param(held(me=3, a=1) + without_owner(2), LIMITS, 3, 0, [], id="it has its share"),
        pytest.param(
            held(me=1, a=2) + without_owner(3, EXPIRED, "dead"),
            LIMITS,
            3,
            2,
            [None],
            id="expired ones up to the target; their owner is not counted",
        ),
        pytest.param(
            held(me=3, a=1) + without_owner(2, VERY_OLD, "dead"),
            LIMITS,
            3,
            2,
            [None],
            id="very old ones beyond the target",
        ),
        pytest.param(
            held(me=3, a=1) + without_owner(2, VERY_OLD, "dead"),
            replace(LIMITS, enable_priority_lease_assignment=False),
            3,
            0,
            [],
            id="very old ones without priority",
        ),
        pytest.param(
            held(me=3, a=1) + without_owner(2, VERY_OLD, "dead"),
            replace(LIMITS, max_leases_for_worker=4),
            3,
            1,
            [None],
            id="very old ones up to the largest number",
        ),
        pytest.param(
            without_owner(4, math.inf), LIMITS, 4, 4, [None], id="new leases are very old"
        ),
        pytest.param(
            held(a=4),
            replace(LIMITS, max_leases_for_worker=1),
            1,
            1,
            ["a"],
            id="a smaller target by the largest number",
        ),
    ],
)
def test_decisions(leases, limits, target, number, victims):
    found = take(leases, limits)
    assert (found.target, len(found.takes)) == (target, number)
    assert {one.from_worker for one in found.takes} <= set(victims)


def test_what_no_worker_may_hold_is_counted():
    assert take(held(a=4), replace(LIMITS, max_leases_for_worker=1)).spilled == 1
    assert take(held(a=4)).spilled == 0


def test_a_lease_in_a_handoff_is_not_stolen_and_a_finished_one_last():
    leases = [
        SeenLease("s0", "a", FRESH, in_handoff=True),
        SeenLease("s1", "a", FRESH, ended=True),
        SeenLease("s2", "a", FRESH),
        SeenLease("s3", "a", FRESH),
    ]
    limits = replace(LIMITS, max_leases_to_steal_at_one_time=2)
    assert {one.lease_key for one in take(leases, limits).takes} == {"s2", "s3"}


workers = st.sampled_from(["me", "a", "b", "c", "d"])
ages = st.sampled_from([0.0, FRESH, FAILOVER, EXPIRED, VERY_OLD])
some_leases = st.lists(
    st.tuples(st.one_of(st.none(), workers), ages, st.booleans(), st.booleans()), max_size=30
).map(
    lambda rows: [
        SeenLease(f"s{n:02}", owner, age, ended, in_handoff and owner is not None)
        for n, (owner, age, ended, in_handoff) in enumerate(rows)
    ]
)
some_limits = st.builds(
    TakeLimits,
    failover_seconds=st.just(FAILOVER),
    max_leases_for_worker=st.integers(1, 12),
    max_leases_to_steal_at_one_time=st.integers(1, 5),
    enable_priority_lease_assignment=st.booleans(),
)


@given(some_leases, some_limits, st.randoms(use_true_random=False))
def test_a_decision_keeps_every_limit(leases, limits, rng):
    before = rng.getstate()
    found = leases_to_take("me", leases, limits, rng)
    by_key = {lease.lease_key: lease for lease in leases}
    keys = [one.lease_key for one in found.takes]
    assert len(set(keys)) == len(keys)
    alive = Counter(
        lease.owner for lease in leases if lease.owner is not None and lease.age_seconds <= FAILOVER
    )
    assert not keys or alive["me"] + len(keys) <= max(limits.max_leases_for_worker, alive["me"])
    stolen = [one for one in found.takes if one.from_worker is not None]
    assert len(stolen) in (0, len(found.takes)), "it steals only if no lease is free"
    if stolen:
        assert all(lease.owner is not None for lease in leases)
        assert len(stolen) <= limits.max_leases_to_steal_at_one_time
        (victim,) = {one.from_worker for one in stolen}
        assert victim != "me"
        assert alive[victim] == max(alive.values())
        assert alive[victim] - len(stolen) > alive["me"], "the victim keeps at least as many"
        assert all(by_key[key].owner == victim and not by_key[key].in_handoff for key in keys)
    for one in found.takes:
        lease = by_key[one.lease_key]
        if one.from_worker is None:
            assert lease.owner is None or lease.age_seconds > FAILOVER
    rng.setstate(before)
    assert leases_to_take("me", list(reversed(leases)), limits, rng) == found


@given(
    st.integers(0, 40),
    st.integers(1, 8),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_a_fleet_comes_to_rest_and_then_nothing_moves(leases, size, at_once, rng):
    """Worker 0 begins with everything; the others decide in turn."""
    crew = [f"w{n}" for n in range(size)]
    owners = {f"s{n:02}": "w0" for n in range(leases)}
    limits = replace(LIMITS, max_leases_to_steal_at_one_time=at_once)
    moves = []
    for _ in range(leases + 2):
        moves.append(0)
        for worker in crew:
            seen = [SeenLease(key, owner, FRESH) for key, owner in owners.items()]
            takes = leases_to_take(worker, seen, limits, rng).takes
            moves[-1] += len(takes)
            owners.update({one.lease_key: worker for one in takes})
    assert moves[-2:] == [0, 0]
    counts = Counter(owners.values())
    target = -(-leases // size)
    assert all(count <= target for count in counts.values())
    assert all(counts[worker] >= target - 1 for worker in crew)
