"""The pictures of the Dagster UI show what the product writes now.

`make screenshots` stores the words of each page next to its pictures. Each format that a picture
shows is made here once more by the product, and must be among these words.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from dagster import DagsterRunStatus, Definitions

from assets.orders import defs
from kcl_pipeline.orchestration.leader import LeaderSince, leading_text, runs_text
from kcl_pipeline.orchestration.reports import (
    FleetTotals,
    lease_table,
    move_table,
    output_metadata,
    worker_table,
)
from kcl_pipeline.orchestration.runs import RunView
from kcl_pipeline.orchestration.supervision import AutoscalerMemory, ScalingDecision
from kcl_pipeline.planning.model import Move, Plan
from kcl_pipeline.status.rows import OwnerChange
from kcl_pipeline.status.snapshot import Snapshot
from kcl_pipeline.worker_status import WorkerStatus, WorkerTotals
from tests.support.dagster_fakes import leases, led, worker

FOLDER = Path(__file__).parents[2] / "docs" / "figures" / "ui"
PICTURES = ("lineage", "output", "leases", "workers", "sensor")
ADVICE = "the product says something else now: run `make screenshots`, look at the pictures, commit"


def words(picture: str) -> str:
    """The words of a picture in one line, without the marks of Markdown."""
    return " ".join((FOLDER / f"{picture}.txt").read_text(encoding="utf-8").split())


def plain(text: str | None) -> str:
    return " ".join((text or "").replace("`", "").split())


def formats(*samples: str) -> str:
    """A pattern of sentences that differ from the samples in numbers and the plural only."""
    found = []
    for sample in samples:
        pattern = re.sub(r"\d+", r"\\d+", re.escape(sample))
        found.append(re.sub(r"(lease|worker|shard)s?\b", r"\1s?", pattern))
    return "|".join(found)


def shown(picture: str, *texts: str) -> None:
    page = words(picture)
    missing = [text for text in texts if plain(text) not in page]
    assert not missing, f"{picture}: {missing}: {ADVICE}"


def ticks() -> str:
    """What a tick may say: with finished leases and moves or not, and with any runs."""
    rows, plan = leases(8, ["w"]), Plan("balanced", (Move("shardId-007", "w", "v", "REASON"),))
    status = DagsterRunStatus
    cycles = [
        led(rows, [worker("w")] * count, plan=made, seconds=0.3)
        for count, made in itertools.product((1, 2), (None, plan))
    ]
    runs = [
        [status.STARTED] * 2,
        [status.STARTED] * 3,
        [status.STARTED, status.QUEUED],
        [status.STARTED, status.STARTING],
        [status.STARTED, status.STARTED, status.CANCELING],
    ]
    decisions = [
        ScalingDecision(memory=AutoscalerMemory(desired=desired), reason="") for desired in (1, 2)
    ]
    sentences = {
        f"{leading_text(cycle, None, LeaderSince())}; "
        + runs_text([RunView("1", one, "w", continuous=True) for one in active], decision)
        for cycle, active, decision in itertools.product(cycles, runs, decisions)
    }
    pattern = formats(*sorted(sentences))
    # The leases that have finished, and the moves of the picture are others.
    pattern = re.sub(r"(\\d\+\\ leases\?)", r"\1(?:\\ \\(\\d+\\ finished\\))?", pattern)
    return re.sub(r"moved.*?REASON\\\)", r"moved\\ .*?\\ \\(.*?\\)", pattern)


def test_every_picture_has_its_words():
    for picture in PICTURES:
        for theme in ("light", "dark"):
            assert (FOLDER / f"{picture}-{theme}.png").exists()
        assert words(picture)


def test_the_sentence_of_a_tick():
    sentence = re.search(r'"tick": "(.*?)", "desired"', words("sensor"))
    assert sentence is not None, ADVICE
    assert re.fullmatch(ticks(), sentence[1]), f"{sentence[1]!r}: {ADVICE}"


def test_descriptions():
    assert isinstance(defs, Definitions)
    sensor = defs.resolve_sensor_def("orders_leader")
    assets = {"/".join(spec.key.path): spec for spec in defs.resolve_all_asset_specs()}
    shown("sensor", sensor.description or "")
    shown("output", assets["orders/orders"].description or "")
    shown("leases", assets["orders/fleet"].description or "")
    shown("workers", assets["orders/fleet"].description or "")


def test_the_tables_of_the_fleet():
    """The names of the columns stand next to each other."""
    snapshot = Snapshot(
        application="orders",
        at=1_000.0,
        leases=tuple(leases(1, ["w"])),
        workers=(worker("w", 10.0, status=WorkerStatus(100)),),
    )
    for picture in ("leases", "workers"):
        for rows in (
            lease_table(snapshot),
            worker_table(snapshot, "-", ()),
            move_table([OwnerChange(990.0, "shardId-000000000001", "w", "v", "why")], 1_000.0),
        ):
            shown(picture, " ".join(rows[0]))


def test_the_figures_of_the_output():
    totals = WorkerTotals(60.0, 9, 9, 9, 9)
    status = WorkerStatus(100, totals=totals, commit_millis_p99=1, put_to_commit_millis_p99=1)
    row = worker("w", run_id="w@1", status=status)
    fleet = FleetTotals()
    fleet.observe([row], 1_000.0)
    figures = output_metadata(fleet.close_period(1_060.0), [row], 1_060.0)
    # Every number has a plot.
    numbers = [name for name, value in figures.items() if isinstance(value, (int, float))]
    assert len(numbers) > 5
    shown("output", *numbers)


@pytest.mark.parametrize("changed", ["0 moves, ", "moved nothing, "])
def test_a_sentence_that_has_changed_is_noticed(changed):
    made = leading_text(led(leases(8, ["w"]), [worker("w")], seconds=0.3), None, LeaderSince())
    run = RunView("1", DagsterRunStatus.STARTED, "w", continuous=True)
    decision = ScalingDecision(memory=AutoscalerMemory(desired=1), reason="1 worker, 1 desired")
    sentence = f"{made}; {runs_text([run, run], decision)}"
    assert re.fullmatch(ticks(), sentence)
    assert not re.fullmatch(ticks(), sentence.replace("no move, ", changed))
