"""Which workers a leader believes to be alive: a row proves nothing by being there."""

from __future__ import annotations

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leader.liveness import Liveness
from kcl_pipeline.leases.row import BadRow, Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.position import LATEST

SETTINGS = ConsumerSettings(application_name="orders", streams=("orders",))
RENEWAL = SETTINGS.lease.renewal_interval_millis / 1000


class Watch:
    """Scans at given times, each instantaneous."""

    def __init__(self, own_id=None):
        self.liveness = Liveness(SETTINGS, own_id)

    def at(self, now, *rows):
        leases = [r for r in rows if isinstance(r, Lease)]
        workers = [r for r in rows if isinstance(r, WorkerMetrics)]
        self.liveness.observe(leases, workers, now, now)
        return self.liveness.observation(now).unconfirmed

    def living(self, now):
        return [row.worker_id for row in self.liveness.living(now)]


def lease(owner=None, counter=1, key="s", **attributes):
    return Lease(key, LATEST, counter=counter, owner=owner, **attributes)


def row(worker, lut=0):
    return WorkerMetrics(worker, lut)


def test_a_row_is_believed_when_it_moves():
    watch = Watch()
    assert watch.at(0, lease(), row("a", 1), row("b", 1)) == {"a", "b"}
    assert watch.at(5, lease(), row("a", 1), row("b", 1)) == {"a", "b"}
    assert watch.at(10, lease(), row("a", 10), row("b", 1)) == {"b"}
    assert watch.at(15, lease(), row("a", 10), row("b", 1)) == {"b"}


def test_or_when_a_lease_of_its_worker_does():
    watch = Watch()
    assert watch.at(0, lease("a"), lease("b", key="t"), lease(key="u"), row("a"), row("b")) == set()
    later = watch.at(5, lease("a", 2), lease("b", key="t"), lease(key="u"), row("a"), row("b"))
    assert later == {"b"}


def test_or_when_it_appears_while_the_leader_looks():
    watch = Watch()
    assert watch.at(0, lease()) == set()
    assert watch.at(1, lease(), row("a")) == set()
    assert watch.at(2, lease()) == set()
    assert watch.at(3, lease(), row("a")) == set(), "also after somebody deleted it"


def test_a_worker_that_leads_knows_itself():
    assert Watch("a").at(0, lease(), row("a"), row("b")) == {"b"}


def test_owners_count_as_alive_until_they_should_have_renewed():
    """The leases of a worker that died some time ago have been given to others."""
    watch = Watch()
    rows = (lease("a"), lease("b", key="t", checkpoint_owner="c"), lease(key="u"))
    workers = (row("a"), row("b"), row("c"), row("silent"))
    assert watch.at(0, *rows, *workers) == {"b", "silent"}
    assert watch.at(RENEWAL, *rows, *workers) == {"b", "silent"}
    assert watch.at(RENEWAL + 0.1, *rows, *workers) == {"a", "b", "c", "silent"}


def test_a_lease_that_this_leader_gave_away_proves_nothing():
    watch = Watch()
    watch.at(0, lease(), row("silent"))
    watch.liveness.note_move(lease("silent", 2), 0.5)
    assert watch.at(1, lease("silent", 2), row("silent")) == {"silent"}


def test_the_leader_whose_lock_expired_does_not_count_as_alive():
    watch = Watch()
    watch.at(0, lease("a"), row("a", 1), row("b", 1))
    assert watch.at(10, lease("a"), row("a", 10), row("b", 10)) == set()
    watch.liveness.begin(11, "a")
    watch.at(11, lease("a"), row("a", 10), row("b", 10))
    assert watch.liveness.observation(11).distrusted == {"a"}


def test_in_a_new_application_every_worker_has_just_started():
    """A cold start does not wait for anything."""
    watch = Watch()
    assert watch.at(0, lease(counter=0), row("a"), row("b")) == set()
    assert watch.at(5, lease("a", 1), lease(counter=0, key="t"), row("a"), row("b")) == set()
    assert watch.at(11, lease("a", 1), lease(counter=0, key="t"), row("a"), row("b")) == {"a", "b"}


def test_before_there_are_leases_as_well():
    assert Watch().at(0, row("a")) == set()


def test_a_leader_that_did_not_look_for_a_while_begins_anew():
    watch = Watch()
    watch.at(0, lease(), row("a", 0))
    assert watch.at(10, lease(), row("a", 10)) == set()
    watch.liveness.begin(20)
    assert watch.at(20, lease(), row("a", 10)) == set(), "it has looked all the time"
    watch.liveness.begin(600)
    assert watch.at(600, lease("b", 7), row("a", 300), row("b", 300)) == {"a"}
    assert watch.at(610, lease("b", 9), row("a", 610), row("b", 300)) == set()


def test_a_leader_that_looks_seldom_confirms_workers_all_the_same():
    watch = Watch()
    watch.at(0, lease(), row("a", 0))
    assert watch.at(90, lease(), row("a", 90)) == set()


def look_at(reports, *, every=1):
    """Scan from the first look to the last report; each scan but those of the first period must
    find the worker alive. `reports` are the times at which its row changes.
    """
    watch = Watch()
    for second in range(0, reports[-1], every):
        watch.at(second, row("java", max(t for t in reports if t <= second)))
        if second >= 31:
            assert watch.living(second) == ["java"], (second, reports)


def reported(*gaps):
    """The times of reports with these gaps in between; the first was before the first look."""
    return [sum(gaps[:count]) for count in range(len(gaps) + 1)]


@pytest.mark.parametrize("early", [[2], [1, 1], [2, 29, 1], [60, 2, 29]])
@pytest.mark.parametrize("every", [1, 5, 7])
def test_early_reports_do_not_make_a_slow_worker_look_dead(early, every):
    """After a pause of the worker, reports that are due follow each other at once."""
    look_at(reported(31, 31, *early, *[31] * 5), every=every)


@pytest.mark.parametrize("phase", [1, 7, 13, 22, 29])
def test_the_first_look_comes_somewhere_within_a_period_of_the_worker(phase):
    """The time from the first look to the first change is no reporting period."""
    times = [time - 31 + phase for time in reported(31, 31, 2, 29, *[31] * 5)]
    look_at([-31 + phase, *times[1:]])


JAVA_1 = """
10.0 39.9 70.5 99.8 129.8 159.4 189.8 220.2 249.7 280.3 309.9 340.0 369.5 400.2 430.0 460.7 489.9
"""
JAVA_2 = """
19.3 49.5 80.4 109.7 139.7 170.2 199.5 229.2 259.5 308.9 319.7 349.7 379.3 409.4 439.1 470.5 499.1
"""


@pytest.mark.parametrize("recorded", [JAVA_1, JAVA_2], ids=["java-1", "java-2"])
@pytest.mark.parametrize("first_look", [0, 3, 8, 14, 21, 27, 270, 300, 312])
@pytest.mark.parametrize("every", [1, 5])
def test_recorded_java_workers_stay_alive(recorded, first_look, every):
    """When the rows of two workers of the Java KCL 3.5.1 with default settings changed, in seconds,
    as read once a second. The second one was stopped from 260 to 308 s, and then made up for a
    missed report.
    """
    times = [float(text) for text in recorded.split()]
    watch = Watch()
    begins = max(times[0], float(first_look))
    now = begins
    while now < times[-1]:
        watch.at(now, row("java", int(max(t for t in times if t <= now))))
        if sum(begins < t <= now for t in times):
            assert watch.living(now) == ["java"], now
        now += every


def test_one_late_report_does_not_keep_a_dead_worker_alive():
    """A worker of this application that was paused once is dead as soon as any other."""
    watch = Watch()
    times = [0, 10, 20, 30, 80, 90]
    for second in range(100):
        watch.at(second, WorkerMetrics("a", max(t for t in times if t <= second), run_id="r"))
    assert watch.living(119) == ["a"]
    assert watch.living(121) == []


def test_a_worker_that_renews_leases_may_report_late_though_its_period_is_known():
    watch = Watch()
    for second in range(0, 45, 5):
        watch.at(second, row("a", second // 10), lease("a", second))
    for second in range(45, 125, 5):
        watch.at(second, row("a", 4), lease("a", second))
    assert watch.living(120) == ["a"]
    watch.at(132, row("a", 4), lease("a", 132))
    assert watch.living(132) == []


@pytest.mark.parametrize("every", [1, 5])
def test_a_java_worker_whose_first_reports_are_early_stays_alive(every):
    """A report 2 s after the start, one on a change of its state, and else one every 30 s."""
    times = [0, 2, 32, 62, 64, 92, 122, 152, 182]
    watch = Watch()
    watch.at(0)
    for second in range(0, 182, every):
        watch.at(second, row("java", max(t for t in times if t <= second)))
        assert watch.living(second) == ["java"], second


def test_a_row_that_cannot_be_read_is_no_stopped_worker():
    """A new owner that has not renewed yet keeps its lease for the whole grace period."""
    for unreadable in (True, False):
        liveness = Liveness(SETTINGS)
        liveness.observe([lease()], [row("a", 1)], 0, 0)
        liveness.observe([lease("a", 2)], [row("a", 2)], 5, 5)
        bad = [BadRow("workers", "a", "sts is 'x'", "2")] if unreadable else []
        for now in (6, 12):
            liveness.observe([lease("a", 2)], [], now, now, unreadable=bad)
        assert ("s" in liveness.observation(12).expired) is not unreadable


def test_an_unreadable_row_that_changes_belongs_to_a_live_worker():
    liveness = Liveness(SETTINGS)
    for now, heartbeat in ((0, "1"), (5, "1"), (10, "2")):
        bad = [BadRow("workers", "a", "sts is 'x'", heartbeat)]
        liveness.observe([], [], now, now, unreadable=bad)
        seen = liveness.observation(now).unreadable
        assert seen == (frozenset({"a"}) if now == 10 else frozenset())
    assert liveness.observation(101).unreadable == frozenset()
    liveness.observe([], [], 102, 102)
    assert liveness.observation(102).unreadable == frozenset()
