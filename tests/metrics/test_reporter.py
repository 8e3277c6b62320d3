"""The reporter of a worker's row: averages, failed intervals, drain requests."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.config import WorkerSettings
from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.metrics.reporter import FIRST_SAMPLE_SECONDS, WorkerMetricsReporter, round_half_up
from kcl_pipeline.planning.state import is_failing


class FakeClock:
    def __init__(self) -> None:
        self.now = 50.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_760_000_000.9 + self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def signal(self):
        raise NotImplementedError

    def lock(self):
        raise NotImplementedError


class Table:
    """Remembers what was written; `answer` changes what comes back, `fail` makes the next writes
    fail.
    """

    name = "app-WorkerMetricStats"

    def __init__(self) -> None:
        self.rows: list[WorkerMetrics] = []
        self.removed: list[str] = []
        self.drain = False
        self.fail = 0

    def report(self, row: WorkerMetrics, *, takes_over: bool = True) -> WorkerMetrics:
        if self.fail:
            self.fail -= 1
            raise UnavailableError("timed out", operation="UpdateItem")
        self.rows.append(row)
        return replace(row, drain_requested=self.drain)

    def deregister(self, worker_id: str, run_id: str | None = None) -> None:
        self.removed.append(worker_id)


class Provider:
    short_name = "C"
    max_utilization_percent = 100

    def __init__(self, *values) -> None:
        self.values = list(values)

    def sample(self):
        value = self.values.pop(0) if self.values else None
        if isinstance(value, Exception):
            raise value
        return value


class Midway(random.Random):
    def random(self) -> float:
        return 0.5


def reporter(provider, table=None, **settings):
    clock, table = FakeClock(), table or Table()
    made = WorkerMetricsReporter(
        table, "w1", WorkerSettings(**settings), clock, Midway(), provider, run_id="r-7"
    )
    return made, table, clock


def capture(made, clock, times):
    for _ in range(times):
        clock.now += 1
        made.capture()


def test_a_worker_without_provider_reports_empty_maps_at_once():
    made, table, clock = reporter(None)
    row = made.report()
    assert row == WorkerMetrics("w1", int(clock.wall()), {}, {}, run_id="r-7")
    assert table.rows == [row]
    assert clock.slept == []


def test_disabled_metrics_are_not_sampled():
    provider = Provider(ValueError("must not be asked"), 50.0)
    made, _, clock = reporter(provider, disable_worker_metrics=True)
    capture(made, clock, 2)
    assert made.report().stats == {}
    assert len(provider.values) == 2


def test_the_first_report_has_a_real_value_and_is_not_a_failed_interval():
    made, _, clock = reporter(Provider(None, 40.0))
    row = made.report()
    assert row.stats == {"C": (40.0,)}
    assert row.operating_range == {"C": (100,)}
    assert clock.slept == [FIRST_SAMPLE_SECONDS]


def test_a_cpu_that_java_does_not_have_is_no_metric_of_the_row():
    provider = Provider(None, 40.0, OSError("gone"))
    provider.short_name = "kclpCpu"
    made, _, clock = reporter(provider)
    row = made.report()
    assert (row.stats, row.operating_range) == ({}, {})
    assert row.own_cpu == row.cpu == (40.0,)
    assert not is_failing(row)
    capture(made, clock, 1)
    assert is_failing(made.report())


def test_intervals_are_averaged_oldest_first_and_failed_ones_are_minus_one():
    made, _, clock = reporter(Provider(10.0, 10.0, 20.0, 33.0, OSError("gone"), None, 5.0))
    made.report()
    capture(made, clock, 3)
    assert made.report().stats == {"C": (10.0, 21.0)}
    capture(made, clock, 2)
    assert made.report().stats == {"C": (10.0, 21.0, -1.0)}
    capture(made, clock, 1)
    assert made.report().stats == {"C": (10.0, 21.0, -1.0, 5.0)}


def test_an_interval_too_short_for_a_capture_says_nothing():
    """Two reports one after the other, as when the first one's answer was lost: minus one would
    keep leases away from a worker that is well.
    """
    made, _, clock = reporter(Provider(10.0, None))
    made.report()
    assert made.report().stats == {"C": (10.0,)}
    capture(made, clock, 1)
    assert made.report().stats == {"C": (10.0, -1.0)}


def test_at_most_ten_averages_are_kept():
    made, _, clock = reporter(Provider(*[float(n) for n in range(14)]))
    made.report()
    for _ in range(13):
        capture(made, clock, 1)
        row = made.report()
    assert row.stats == {"C": tuple(float(n) for n in range(4, 14))}


def test_at_most_300_raw_values_are_averaged():
    made, _, clock = reporter(Provider(0.0, *[100.0] * 50, *[10.0] * 300))
    made.report()
    capture(made, clock, 350)
    assert made.report().stats["C"][-1] == 10.0


@pytest.mark.parametrize(
    "value", [-0.1, 100.1, float("nan"), float("inf"), RuntimeError("a custom provider"), "text"]
)
def test_a_capture_that_fails_never_raises_and_leaves_no_value(value):
    made, _, clock = reporter(Provider(50.0, value))
    made.report()
    capture(made, clock, 1)
    assert made.report().stats == {"C": (50.0, -1.0)}


def test_a_provider_that_never_gave_a_value_is_no_metric_and_not_a_failing_worker():
    made, _, clock = reporter(Provider(*[OSError("no endpoint")] * 4, 70.0))
    for _ in range(2):
        assert made.report().stats == {}
        capture(made, clock, 1)
    capture(made, clock, 1)
    assert made.report().stats == {"C": (70.0,)}


def test_trouble_is_logged_once_per_outage(caplog):
    made, _, clock = reporter(Provider(1.0, OSError("one"), OSError("two"), 2.0, OSError("three")))
    made.report()
    capture(made, clock, 4)
    assert [r.getMessage().rsplit(" ", 1)[-1] for r in caplog.records] == ["one", "three"]


def test_workers_started_together_do_not_sample_together():
    made, _, clock = reporter(Provider(5.0, 6.0))
    clock.now += 0.49
    made.capture()
    assert len(made._raw) == 0
    clock.now += 0.02
    made.capture()
    assert list(made._raw) == [5.0]


def test_a_report_that_fails_raises_and_its_average_is_in_the_next():
    made, table, clock = reporter(Provider(1.0, 2.0, 3.0))
    made.report()
    capture(made, clock, 1)
    table.fail = 1
    with pytest.raises(UnavailableError):
        made.report()
    capture(made, clock, 1)
    assert made.report().stats == {"C": (1.0, 2.0, 3.0)}


def test_a_drain_request_is_seen_and_stays():
    made, table, _ = reporter(None)
    made.report()
    assert not made.drain_requested
    table.drain = True
    made.report()
    assert made.drain_requested
    table.drain = False
    made.report()
    assert made.drain_requested


def test_after_deregistration_the_row_is_not_written_again():
    made, table, _ = reporter(None)
    made.report()
    made.deregister()
    made.report()
    assert table.removed == ["w1"]
    assert len(table.rows) == 1


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0.0000005, 0.000001),
        (0.00000049, 0.0),
        (12.3456785, 12.345679),
        (100.0, 100.0),
        (33.333333333, 33.333333),
    ],
)
def test_six_decimals_half_up(value, rounded):
    assert round_half_up(value) == rounded


@given(st.floats(0, 100))
def test_rounding_stays_within_half_a_millionth(value):
    assert abs(round_half_up(value) - value) <= 0.5000001e-6
