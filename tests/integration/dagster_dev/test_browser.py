"""What the Dagster UI shows of a running pipeline, looked at in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import MISSING, Browser, browser
from tests.support.dagster_stage import Stage

pytestmark = [
    pytest.mark.processes,
    pytest.mark.browser,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"needs a browser that shows the Dagster UI; there is no {' and no '.join(MISSING)}",
    ),
]


@pytest.fixture(scope="module")
def looker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("page")) as one:
        yield one


def located(stage: Stage) -> str:
    repository = (
        f"{stage.location[1]}@{stage.location[0]}"
        if stage.location[1] != "__repository__"
        else stage.location[0]
    )
    return f"{stage.page.url}/locations/{repository}"


def size(path: Path) -> int:
    return path.stat().st_size


def test_the_group_shows_its_assets_and_that_their_checks_pass(stage: Stage, looker: Browser):
    looker.open(f"{located(stage)}/asset-groups/orders/lineage")
    looker.wait_for(
        "fleet",
        "events",
        "Materialized",
        "Passed",
    )
    assert size(looker.shoot("group")) > 20_000


@pytest.mark.long  # integration/test_definitions has the lineage without a page
def test_the_lineage_of_the_output_has_the_stream(stage: Stage, looker: Browser):
    looker.open(
        f"{stage.page.url}/assets/orders/events?view=lineage&lineageScope=upstream&lineageDepth=2"
    )
    # The stream is in a group of its own, which is shown around it
    looker.wait_for("kinesis", "orders", "events")
    assert size(looker.shoot("lineage")) > 20_000


@pytest.mark.long
def test_the_sensor_page_shows_its_ticks(stage: Stage, looker: Browser):
    looker.open(f"{located(stage)}/sensors/orders_leader")
    shown = looker.wait_for(
        "orders_leader",
        "Running",
        "Leader of orders",
        "0 runs requested",
        "View logs",
        '"tick": "led: 3 leases, 1 worker, no move, ',
    )
    assert shown.count("View logs") >= 2
    assert "Failure" not in shown
    assert size(looker.shoot("sensor")) > 20_000


@pytest.mark.long  # dagster_dev/test_runs has the figures without a page
def test_the_output_page_shows_the_figures_of_its_materialization(stage: Stage, looker: Browser):
    looker.open(f"{stage.page.url}/assets/orders/events?view=overview")
    looker.wait_for("Latest materialization", "records", "rows", "table_version")
    looker.shoot("output")


@pytest.mark.long  # orchestration/assets has the results of the checks
def test_the_output_page_shows_its_checks(stage: Stage, looker: Browser):
    looker.open(f"{stage.page.url}/assets/orders/events?view=checks")
    looker.wait_for("lag_below_threshold", "data_within_retention", "no_new_dead_letters")
    looker.click("lag_below_threshold")
    # A check that passes again is reported again after a minute. The first one may have seen a lag.
    texts = ("Passed", "0.0 s behind the end of the stream")
    shown = looker.wait_for(*texts, seconds=90)
    assert "Not evaluated" not in shown
    looker.shoot("output-checks")


def test_the_fleet_page_shows_every_lease_and_worker(stage: Stage, looker: Browser):
    looker.open(f"{stage.page.url}/assets/orders/fleet?view=overview")
    shown = looker.wait_for(
        "lease_rows", "last_moves", "checkpoint", "KB/s", "worker_rows", "dead letters", "working"
    )
    assert "shardId-" not in shown, "the table has the numbers of the shards"
    assert looker.cut_off() == {}, "every column is shown"
    looker.shoot("leases")


@pytest.mark.long  # orchestration/assets has the results of the checks
def test_the_fleet_page_shows_its_checks(stage: Stage, looker: Browser):
    looker.open(f"{stage.page.url}/assets/orders/fleet?view=checks")
    looker.wait_for("shards_covered", "shards_moving")
    looker.shoot("lease-checks")


@pytest.mark.long  # two reports of a check, a minute each
def test_the_output_page_says_since_when_nothing_arrives(stage: Stage, looker: Browser):
    """Nothing is published until now, after the records of the start."""
    looker.open(f"{stage.page.url}/assets/orders/events?view=overview")
    shown = looker.wait_for("Latest materialization", "Latest check results", "records_per_second")
    assert "says since when nothing has arrived" in shown
    assert not {"Freshness", "Failing", "Overdue"} & set(shown.split()), "nothing is wrong"
    looker.shoot("idle")
    looker.open(f"{stage.page.url}/assets/orders/events?view=checks")
    looker.wait_for("lag_below_threshold")
    looker.click("lag_below_threshold")
    # A minute without a batch, and the next report of the check.
    text = "nothing waits, and nothing has arrived since the last batch was committed at "
    looker.wait_for("Passed", text, seconds=150)
    looker.shoot("idle-check")


@pytest.mark.long  # a second report
def test_the_output_page_draws_a_line_for_each_figure(stage: Stage, looker: Browser):
    stage.publish(100)
    stage.wait(
        "a second report, without which there is no line",
        lambda: stage.reported(2, "dagster/row_count"),
        seconds=150,
    )
    looker.open(f"{stage.page.url}/assets/orders/events?view=overview")
    looker.wait_for("Plots", "dead_letters", seconds=90)
    looker.click("Plots")
    looker.wait_for("records_per_second", "mb_per_second", "lag_seconds_max")
    looker.wait_for_lines(5)
    looker.shoot("plots")
