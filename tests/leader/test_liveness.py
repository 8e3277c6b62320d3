"""What the leader remembers (protocol §5.3): ages on its own clock, grace of new owners, trust in
workers.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leader.liveness import Liveness
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.position import LATEST, SHARD_END

SETTINGS = ConsumerSettings(application_name="orders", streams=("orders",))
FAILOVER, GRACE = 10.0, 10.0 + 9.975
FAST = ConsumerSettings(
    application_name="orders", streams=("orders",), lease={"failover_time_millis": 3_000}
)


class Seen:
    """Scans at given times, each instantaneous unless said otherwise."""

    def __init__(self, settings=SETTINGS):
        self.liveness = Liveness(settings)

    def at(self, now, *rows, answered=None):
        leases = [r for r in rows if isinstance(r, Lease)]
        workers = [r for r in rows if isinstance(r, WorkerMetrics)]
        self.liveness.observe(leases, workers, now, now if answered is None else answered)
        return self.liveness.observation(now)


def lease(counter=1, owner="a", **attributes):
    return Lease(
        "s", attributes.pop("checkpoint", LATEST), counter=counter, owner=owner, **attributes
    )


def row(worker="a", lut=0, **attributes):
    return WorkerMetrics(worker, lut, **attributes)


def test_an_owner_seen_renewing_has_the_failover_time():
    seen = Seen()
    seen.at(0, lease(1))
    seen.at(5, lease(2))
    assert seen.at(15, lease(2)).expired == frozenset()
    late = seen.at(15.1, lease(2))
    assert late.expired == {"s"}
    assert late.waited_seconds["s"] == pytest.approx(10.1)
    assert seen.at(16, lease(3)).expired == frozenset()


def test_an_owner_not_yet_seen_renewing_has_the_discovery_interval_on_top():
    """Its row has no run id: it is a Java worker."""
    seen, rows = Seen(), (row("a"), row("b"))
    seen.at(0, lease(1, "a"), *rows)
    assert seen.at(GRACE, lease(1, "a"), *rows).expired == frozenset()
    assert seen.at(GRACE + 0.1, lease(1, "a"), *rows).expired == {"s"}
    seen.at(30, lease(2, "b"), *rows)
    assert seen.at(30 + GRACE, lease(2, "b"), *rows).expired == frozenset()
    assert seen.at(30 + GRACE + 0.1, lease(2, "b"), *rows).expired == {"s"}


def test_a_worker_that_stopped_while_it_was_given_a_lease_is_not_waited_for():
    """Its row is gone, and it has not renewed since: it will not find the lease any more."""
    seen = Seen()
    seen.at(0, lease(1, None), row("a", 1), row("b", 1))
    seen.at(1, lease(2, "a"), row("a", 1), row("b", 1))
    assert seen.at(2, lease(2, "a"), row("b", 2)).expired == frozenset(), (
        "it may be giving it back just now"
    )
    assert seen.at(5.5, lease(2, "a"), row("b", 5)).expired == {"s"}
    assert seen.at(6, lease(3, "b"), row("b", 6)).expired == frozenset()


def test_one_without_a_row_that_renews_or_never_had_one_keeps_its_time():
    """A row may be deleted by hand, and workers of KCL 2 have none."""
    seen = Seen()
    seen.at(0, lease(1, "a"), row("a", 1))
    seen.at(1, lease(2, "a"))
    assert seen.at(10, lease(2, "a")).expired == frozenset()
    assert seen.at(11.1, lease(2, "a")).expired == {"s"}
    never = Seen()
    never.at(0, lease(1, "a"))
    assert never.at(GRACE, lease(1, "a")).expired == frozenset()


def test_a_row_that_comes_back_is_a_worker_that_is_there():
    seen = Seen()
    seen.at(0, lease(1, "a"), row("a", 1))
    seen.at(1, lease(1, "a"))
    seen.at(2, lease(1, "a"), row("a", 2))
    assert seen.at(10, lease(1, "a"), row("a", 9)).expired == frozenset()


def test_a_pause_of_the_leader_is_not_silence_of_the_workers():
    seen = Seen()
    seen.at(0, lease(1))
    seen.at(5, lease(2))
    paused = seen.at(6, lease(2), row(lut=0), answered=500)
    assert (paused.expired, paused.distrusted) == (frozenset(), frozenset()), (
        "the answer is as old as the question"
    )
    assert seen.at(501, lease(3)).expired == frozenset()
    assert seen.at(505, lease(3)).expired == frozenset()


def test_a_move_written_by_the_leader_proves_nothing_about_the_owner():
    seen = Seen()
    seen.at(0, lease(1), row())
    seen.at(1, lease(2), row())
    assert seen.at(20, lease(2), row()).expired == {"s"}
    seen.liveness.note_move(lease(3), 20.5)
    again = seen.at(21, lease(3), row())
    assert again.expired == frozenset()
    assert again.distrusted == {"a"}
    assert seen.at(20.5 + FAILOVER + 1, lease(3), row()).expired == frozenset()
    assert seen.at(20.5 + GRACE + 1, lease(3), row()).expired == {"s"}


def test_an_unowned_lease_waits_and_its_last_owner_is_remembered():
    seen = Seen()
    seen.at(0, lease(1, "a"))
    free = seen.at(5, lease(2, None))
    assert free.expired == frozenset()
    assert free.last_owners == {"s": "a"}
    assert seen.at(9, lease(2, None)).waited_seconds["s"] == pytest.approx(4)
    assert seen.at(10, lease(3, "b")).waited_seconds == {}


def test_a_handoff_is_overdue_after_its_time_out_and_the_failover_time_and_a_new_pair_begins_anew():
    seen = Seen()
    for second in range(0, 40, 2):
        assert (
            seen.at(second, lease(second, "b", checkpoint_owner="a")).overdue_handoffs
            == frozenset()
        )
    assert seen.at(41, lease(41, "b", checkpoint_owner="a")).overdue_handoffs == {"s"}
    assert seen.at(42, lease(42, "c", checkpoint_owner="a")).overdue_handoffs == frozenset()


def test_moves_are_remembered_by_the_one_who_processes():
    seen = Seen()
    seen.at(0, lease(1, "a"))
    assert seen.at(1, lease(2, "a")).moved_seconds == {}
    assert seen.at(2, lease(3, "b", checkpoint_owner="a")).moved_seconds == {}
    seen.at(3, lease(4, "b"))
    assert seen.at(9, lease(5, "b")).moved_seconds == {"s": 6}


def test_a_worker_that_let_a_lease_expire_must_report_before_it_is_trusted():
    seen = Seen()
    seen.at(0, lease(1), row(lut=0))
    seen.at(1, lease(2), row(lut=0))
    assert seen.at(12, lease(2), row(lut=0)).distrusted == {"a"}
    assert seen.at(13, lease(3, "b"), row(lut=0)).distrusted == {"a"}, (
        "also when it has no expired lease any more"
    )
    assert seen.at(14, lease(4, "b"), row(lut=14)).distrusted == frozenset()


def test_leases_of_one_silence_that_expire_one_after_the_other_count_once():
    """A worker that was restarted after two such silences stayed without
    leases for seven failover times, and leases had to move a second time for it.
    """
    seen = Seen()
    rows = [lease(1), replace(lease(1, "b"), lease_key="t")]
    seen.at(0, *rows, row(lut=0))
    rows = [lease(2), replace(lease(2), lease_key="t")]
    seen.at(5, *rows, row(lut=0))
    assert seen.at(16, *rows, row(lut=0)).expired == {"s"}
    assert seen.at(5 + GRACE + 1, *rows, row(lut=0)).expired == {"s", "t"}
    rows = [lease(3, "b"), replace(lease(3, "b"), lease_key="t")]
    assert seen.at(27, *rows, row(lut=27)).distrusted == frozenset(), "it has failed once"


class Denied:
    """Worker `a` reports every second and can renew nothing; `b`, if it lives, is at work."""

    def __init__(self, *, with_other=True):
        self.seen, self.now, self.counter = Seen(FAST), 0, 1
        self.with_other, self.owner = with_other, "a"

    def second(self):
        self.now += 1
        rows = [row("a", self.now, run_id="a-run")]
        leases = [lease(self.counter, self.owner)]
        if self.with_other:
            rows.append(row("b", self.now, run_id="b-run"))
            leases.append(replace(lease(self.now, "b"), lease_key="t"))
        return self.seen.at(self.now, *leases, *rows)

    def until(self, condition):
        began = self.now
        while not condition(self.second()):
            assert self.now - began < 100
        return self.now - began

    def assign(self, owner):
        self.counter, self.owner = self.counter + 1, owner
        self.seen.liveness.note_move(lease(self.counter, owner), self.now)


def test_a_worker_on_probation_that_lets_its_lease_expire_gets_none_for_ten_failover_times():
    fleet = Denied()
    fleet.until(lambda seen: "s" in seen.expired)
    assert fleet.until(lambda seen: not seen.distrusted) == 1, "it reports, and gets one lease"
    assert fleet.seen.liveness.on_probation() == {"a"}
    fleet.assign("a")
    assert fleet.second().distrusted == {"a"}, "no second one before it has renewed the first"
    fleet.until(lambda seen: "s" in seen.expired)
    fleet.assign("b")
    assert fleet.until(lambda seen: not seen.distrusted) == pytest.approx(30, abs=1)


def test_a_renewal_ends_the_probation():
    fleet = Denied()
    fleet.until(lambda seen: "s" in seen.expired)
    fleet.second()
    fleet.assign("a")
    assert fleet.second().distrusted == {"a"}
    fleet.counter += 1
    assert fleet.second().distrusted == frozenset()
    assert fleet.seen.liveness.on_probation() == frozenset()


def test_the_only_living_worker_is_tried_again_at_once():
    fleet = Denied(with_other=False)
    fleet.until(lambda seen: "s" in seen.expired)
    fleet.second()
    fleet.assign("a")
    fleet.until(lambda seen: "s" in seen.expired)
    assert fleet.until(lambda seen: not seen.distrusted) <= 1


def living(seen, now):
    return [w.worker_id for w in seen.liveness.living(now)]


def test_a_worker_lives_while_its_row_changes_whatever_its_clock_says():
    seen = Seen()

    def row(worker="a", lut=0):
        return WorkerMetrics(worker, lut, run_id=f"{worker}-run")

    seen.at(0, row(lut=5_000_000_000), row("b", lut=12))
    assert living(seen, 0) == ["a", "b"]
    seen.at(10, row(lut=4_000_000_000), row("b", lut=12))
    assert living(seen, 29.9) == ["a", "b"]
    seen.at(35, row(lut=4_000_000_000), row("b", lut=12))
    assert living(seen, 35) == ["a"]
    seen.at(36, row(lut=4_000_000_000), row("b", lut=13))
    assert living(seen, 36) == ["a", "b"]
    seen.at(37)
    assert living(seen, 37) == []


def test_a_peer_that_reports_every_thirty_seconds_stays_alive():
    seen = Seen()
    for second in range(0, 300, 5):
        seen.at(second, row("java", lut=second // 30), lease(second, "java"))
        assert living(seen, second) == ["java"]
    for second in range(300, 390, 5):
        seen.at(second, row("java", lut=9))
    assert living(seen, 390) == []


def test_a_row_that_never_changes_dies_even_if_its_worker_had_leases():
    seen = Seen()
    for second in range(0, 95, 5):
        seen.at(second, row("leaving", lut=7), lease(second, "leaving"))
    assert living(seen, 80) == ["leaving"]
    assert living(seen, 91) == []
    assert seen.liveness.unchanged_for(80, 90) == (row("leaving", lut=7),)
    assert seen.liveness.unchanged_for(91, 90) == ()


def test_how_long_a_lease_has_been_finished():
    seen = Seen()
    seen.at(0, lease(1))
    seen.at(5, lease(2, checkpoint=SHARD_END))
    seen.at(9, lease(3, checkpoint=SHARD_END))
    assert seen.liveness.ended_seconds(9) == {"s": 4}
    seen.at(10)
    assert seen.liveness.ended_seconds(10) == {}


def test_drain_flag_alone_is_no_sign_of_life():
    seen = Seen()
    seen.at(0, row(lut=1, run_id="r"))
    seen.at(29, replace(row(lut=1, run_id="r"), drain_requested=True))
    assert living(seen, 31) == []


def test_an_owner_of_this_package_discovers_its_lease_sooner_than_a_java_worker():
    seen = Seen()
    own = row("a", 1, run_id="a@1")
    seen.at(0, lease(1, None), own)
    seen.at(1, lease(2, "a"), own)
    assert seen.at(11.6, lease(2, "a"), own).expired == frozenset()
    assert seen.at(11.7, lease(2, "a"), own).expired == {"s"}


def test_the_next_expiry_is_the_earliest_one():
    seen = Seen()
    assert seen.liveness.next_expiry_seconds(0) == math.inf
    seen.at(0, lease(1))
    assert seen.liveness.next_expiry_seconds(4) == pytest.approx(GRACE - 4)
    seen.at(5, lease(2))
    assert seen.liveness.next_expiry_seconds(8) == pytest.approx(FAILOVER - 3)
    assert seen.liveness.next_expiry_seconds(15.5) == math.inf


def test_a_leader_whose_lock_expired_gets_nothing_until_it_reports():
    seen = Seen()
    for second in range(0, 25, 5):
        seen.at(second, lease(second), row("a", second))
    seen.liveness.begin(25, "a")
    assert seen.at(25, lease(20), row("a", 20)).distrusted == {"a"}
    assert seen.at(30, lease(20), row("a", 30)).distrusted == frozenset()


@pytest.mark.parametrize("how", ["note_move", "scan"])
def test_a_lease_that_it_is_assigned_later_waits_for_the_discovery(how):
    seen, own = Seen(FAST), row("a", 1, run_id="a@1")
    seen.at(0, lease(1, "b"), own)
    seen.liveness.begin(2.5, "a")
    seen.at(2.5, lease(1, "b"), own)
    if how == "note_move":
        seen.liveness.note_move(lease(2, "a"), 3.0)
    seen.at(3.0, lease(2, "a"), own)
    assert seen.at(8.9, lease(2, "a"), own).expired == frozenset()
    assert seen.at(9.0, lease(2, "a"), own).expired == {"s"}


@pytest.mark.parametrize(("replaced", "run_id"), [(None, "a@1"), ("b", "a@1"), ("a", None)])
def test_leases_of_other_workers_wait_for_the_discovery(replaced, run_id):
    """A Java worker that leads discovers its leases as one that does not."""
    seen, own = Seen(FAST), row("a", 1, run_id=run_id)
    seen.at(0, lease(1, "a"), own)
    seen.liveness.begin(2.5, replaced)
    assert seen.at(5.9, lease(1, "a"), own).expired == frozenset()
