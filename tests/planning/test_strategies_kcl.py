"""KCL's strategies: thresholds, dampening, and leases that rest."""

from __future__ import annotations

from kcl_pipeline.planning.model import LeaseState, WorkerState
from tests.support.plans import NAMES, after, counts, fleet, plan


def test_heavy_leases_leave_the_hot_worker_by_the_dampened_amount():
    leases = [LeaseState(f"hot{i}", "w00", 100.0) for i in range(10)] + [
        LeaseState("cold", "w01", 100.0)
    ]
    workers = [
        WorkerState("w00", metrics={"C": 90.0}, limits={"C": 100.0}),
        WorkerState("w01", metrics={"C": 10.0}, limits={"C": 100.0}),
    ]
    made = plan("kcl_variance", leases, workers)
    # To take: 1000 × (90 − 50)/90 × 0.6 = 267 KiB/s, hence two of 100; each adds 50 × 100/550 = 9
    # points to the target, which stays below the mean.
    assert [(m.from_worker, m.to_worker) for m in made.moves] == [("w00", "w01")] * 2
    assert "C of w00 is 90.0, the mean is 50.0" in made.moves[0].reason


def test_a_lease_that_fits_nobody_does_not_cost_its_target_the_next_one():
    """KCL polls the target, finds that the first lease does not fit, and has lost the target for
    the rest of the run (protocol §5.5 step 5).
    """
    leases = [
        *(LeaseState(f"heavy{i}", "w00", 226.0) for i in range(5)),
        LeaseState("big", "w00", 150.0),
        LeaseState("small", "w00", 20.0),
    ]
    leases += [LeaseState("x", "w01", 100.0), LeaseState("y", "w02", 100.0)]
    workers = [
        WorkerState(f"w0{i}", metrics={"C": cpu}, limits={"C": 100.0})
        for i, cpu in enumerate((90.0, 50.0, 70.0))
    ]
    # To take: 1300 × 20/90 × 0.6 = 173. The big one would raise w01 by 70 × 150/500 = 21 points
    # over the mean of 70; the small one by 2.8.
    assert [(m.lease_key, m.to_worker) for m in plan("kcl_variance", leases, workers).moves] == [
        ("small", "w01")
    ]


def test_within_the_threshold_nothing_moves():
    leases = [LeaseState(f"s{i}", f"w{i % 2:02}", 10.0 + i) for i in range(8)]
    workers = [WorkerState("w00", metrics={"C": 52.0}), WorkerState("w01", metrics={"C": 48.0})]
    assert plan("kcl_variance", leases, workers).moves == ()
    noise = [WorkerState("w00", metrics={"C": 0.2}), WorkerState("w01", metrics={"C": 1.9})]
    assert plan("kcl_variance", leases, noise).moves == ()


def test_a_lease_that_moved_lately_stays_unless_its_worker_is_above_its_range():
    """Seed 6035574385: noise in the averages moved one lease back and forth every few seconds."""
    leases = [LeaseState(f"s{i}", "w00", 10.0, seconds_since_move=119.0) for i in range(8)]
    leases.append(LeaseState("x", "w01", 10.0))
    hot, calm = (
        [
            WorkerState("w00", metrics={"C": 90.0}, limits={"C": limit}),
            WorkerState("w01", metrics={"C": 10.0}, limits={"C": 100.0}),
        ]
        for limit in (80.0, 100.0)
    )
    assert plan("kcl_variance", leases, calm).moves == ()
    assert plan("kcl_variance", leases, calm, cool_down_seconds=119.0).moves
    assert plan("kcl_variance", leases, hot).moves


def test_above_its_operating_range_a_worker_gives_even_when_the_fleet_is_even():
    leases = [LeaseState(f"s{i}", f"w{i % 2:02}", 10.0) for i in range(8)]
    workers = [
        WorkerState("w00", metrics={"C": 60.0}, limits={"C": 50.0}),
        WorkerState("w01", metrics={"C": 50.0}, limits={"C": 100.0}),
    ]
    made = plan("kcl_variance", leases, workers)
    assert {m.from_worker for m in made.moves} <= {"w00"}


def test_overshoot_is_a_setting():
    leases = [
        LeaseState("a", "w00", 400.0),
        LeaseState("b", "w00", 60.0),
        LeaseState("c", "w01", 350.0),
    ]
    workers = [
        WorkerState("w00", metrics={"C": 60.0}, limits={"C": 100.0}),
        WorkerState("w01", metrics={"C": 40.0}, limits={"C": 100.0}),
    ]
    assert [m.lease_key for m in plan("kcl_variance", leases, workers).moves] == ["b"]
    assert plan("kcl_variance", leases, workers, allow_throughput_overshoot=False).moves == ()


def test_the_last_lease_is_not_taken_for_balance():
    leases = [
        LeaseState("a", "w00", 1.0),
        LeaseState("b", "w01", 10.0),
        LeaseState("c", "w01", 10.0),
    ]
    workers = [
        WorkerState("w00", metrics={"C": 80.0}, limits={"C": 100.0}),
        WorkerState("w01", metrics={"C": 5.0}, limits={"C": 100.0}),
    ]
    assert plan("kcl_variance", leases, workers).moves == ()


def test_counting_is_even_and_finished_leases_do_not_count():
    leases = [LeaseState(f"e{i}", "w00", ended=True) for i in range(5)] + [
        LeaseState(f"s{i}", "w01") for i in range(7)
    ]
    members = fleet(3)
    made = plan("lease_count_based", leases, members)
    assert sorted(counts(after(leases, made.moves), members)) == [2, 2, 3]
    assert not any(m.lease_key.startswith("e") for m in made.moves)


def test_an_immovable_lease_stays_and_others_go_in_its_place():
    leases = [LeaseState(f"s{i}", "w00", movable=i > 2) for i in range(4)]
    made = plan("lease_count_based", leases, fleet(2))
    assert [m.lease_key for m in made.moves] == ["s3"]


def test_the_longest_wait_is_placed_first_when_there_is_not_room_for_all():
    leases = [
        LeaseState("new", None, waited_seconds=1.0),
        LeaseState("old", None, waited_seconds=60.0),
    ]
    for name in NAMES:
        made = plan(name, leases, fleet(1), max_leases_for_worker=1)
        assert [m.lease_key for m in made.moves] == ["old"]
        assert made.spilled == ("new",)


def test_a_target_without_room_is_passed_over():
    leases = [LeaseState(f"s{i}", "w00", 10.0) for i in range(8)]
    leases += [LeaseState(f"e{i}", "w01", ended=True) for i in range(7)]
    leases += [LeaseState("x", "w01", 10.0), LeaseState("y", "w02", 10.0)]
    workers = [
        WorkerState(f"w0{i}", metrics={"C": cpu}, limits={"C": 100.0})
        for i, cpu in enumerate((90.0, 10.0, 20.0))
    ]
    made = plan("kcl_variance", leases, workers, max_leases_for_worker=8)
    assert {move.to_worker for move in made.moves} == {"w02"}
