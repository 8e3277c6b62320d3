"""The figures of the lease table: what they show, their size, and how often they are drawn."""

from __future__ import annotations

import base64
import random
import re
import sys
from dataclasses import replace
from xml.etree import ElementTree as ET

import dagster as dg
import pytest

from kcl_pipeline.leases.state.worker_status import WorkerStatus
from kcl_pipeline.orchestration.sensors.reports.figures import drawing, report
from kcl_pipeline.orchestration.sensors.reports.figures.lag import (
    MAX_POINTS,
    NO_LAG,
    SAMPLE_SECONDS,
    WINDOW_SECONDS,
    LagHistory,
    draw_lag,
)
from kcl_pipeline.orchestration.sensors.reports.figures.load import MAX_BARS, draw_load
from kcl_pipeline.orchestration.sensors.reports.figures.report import (
    FIGURES_SECONDS,
    FIRST_SECONDS,
    Figures,
)
from kcl_pipeline.orchestration.sensors.reports.figures.shards import (
    MAX_SHARDS,
    boxes,
    draw_shards,
    stream_to_draw,
)
from kcl_pipeline.planning.explain import explain
from kcl_pipeline.planning.model import LeaseState, Move, Plan, PlanInput, PlanLimits, WorkerState
from kcl_pipeline.position import SHARD_END
from kcl_pipeline.shards import HashKeyRange
from tests.support.dagster_fakes import FakeCycle, FakePipeline, leases, led, worker
from tests.support.sensor_stage import (  # noqa: F401 (fixtures)
    Stage,
    instance_fixture,
)

LIGHT, DARK = "#ffffff", "#1b1e2b"
HOSTILE = "$\\frac{a}$<script>\n\x1b[31m&"


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("colour", [*drawing.COLOURS, drawing.OTHERS, drawing.TEXT])
@pytest.mark.parametrize("background", [LIGHT, DARK])
def test_every_colour_is_readable_in_light_and_dark(colour, background):
    high, low = sorted((luminance(colour), luminance(background)), reverse=True)
    assert (high + 0.05) / (low + 0.05) >= 3


def svg_text(uri: str) -> list[str]:
    """The text in a figure; it also shows that the figure is a valid image."""
    assert len(uri) <= drawing.MAX_BYTES
    head, _, body = uri.partition(",")
    assert head == "data:image/svg+xml;base64"
    root = ET.fromstring(base64.b64decode(body))  # of our own making
    return ["".join(one.itertext()) for one in root.iter() if one.tag.endswith("}text")]


def lagging(count: int, seconds: float = 1.0):
    return [
        replace(worker(f"orders-{n}"), status=WorkerStatus(round(1000 * seconds * n)))
        for n in range(count)
    ]


def test_the_lag_of_each_worker_is_a_line():
    history = LagHistory()
    for number in range(5):
        history.observe(lagging(3), 1_000.0 + 30 * number)
    history.observe(lagging(3, 9.0), 1_121.0)  # too early
    assert history.series() == {
        name: [(1_000.0, lag), (1_020.0, lag), (1_060.0, lag), (1_080.0, lag), (1_120.0, lag)]
        for name, lag in (("orders-2", 2.0), ("orders-1", 1.0), ("orders-0", 0.0))
    }
    shown = svg_text(draw_lag(history.series()))
    assert {"Lag by worker", "orders-1", "seconds"} <= set(shown)


def test_many_workers_and_hours_fit_into_one_figure():
    history, draw = LagHistory(), random.Random(7)
    for number in range(800):
        history.observe(lagging(40, draw.random()), 30.0 * number)
    assert history.samples[-1][0] - history.samples[0][0] <= WINDOW_SECONDS
    series = history.series()
    assert list(series)[:2] == ["orders-39", "orders-38"]
    assert list(series)[-1] == "33 other workers"
    assert max(len(line) for line in series.values()) <= MAX_POINTS
    assert "33 other workers" in svg_text(draw_lag(series))


def test_without_a_known_lag_the_figure_says_so():
    assert LagHistory().series() == {}
    shown = svg_text(draw_lag({}))
    assert NO_LAG in shown
    assert not [text for text in shown if text.startswith("00:00")], "there is no time"


def test_the_first_figures_wait_for_a_line():
    """Workers that start have no lag. The next figures come after ten minutes only."""
    starting = [replace(one, status=WorkerStatus(None)) for one in lagging(2)]
    for workers, seconds in ((lagging(2), 3 * SAMPLE_SECONDS), (starting, FIRST_SECONDS)):
        figures, at = Figures(), 1_000.0
        figures.lags.observe(starting, at)
        figures.lags.observe(starting, at + SAMPLE_SECONDS)
        assert not figures._is_worth_drawing()
        figures.lags.observe(workers, at + 2 * SAMPLE_SECONDS)
        assert not figures._is_worth_drawing()
        figures.lags.observe(workers, at + seconds)
        assert figures._is_worth_drawing()


def planned(workers: int, moves: int = 1):
    names = [f"eu{'abc'[n % 3]}-{n}" for n in range(workers)]
    rows = tuple(LeaseState(f"s-{n}", names[n % workers], 10.0 + n) for n in range(2 * workers))
    given = PlanInput(rows, tuple(WorkerState(n, n[:3]) for n in names), PlanLimits())
    moved = tuple(Move(f"s-{n}", names[n], names[-1], "because") for n in range(moves))
    return given, Plan("balanced", moved)


def test_the_load_before_and_after_the_plan():
    shown = svg_text(draw_load(explain(*planned(4))))
    assert {"Load by worker", "Load by group", "before", "after", "eua-0", "eua-3"} <= set(shown)


def test_of_many_workers_those_that_the_plan_changes_are_shown():
    shown = svg_text(draw_load(explain(*planned(60))))
    assert f"Load by worker ({60 - MAX_BARS} not shown)" in shown
    assert {"eua-0", "euc-59"} <= set(shown)


def split(rows, count, seed=3):
    """Split random shards."""
    rows, draw = list(rows), random.Random(seed)
    for _ in range(count):
        at = draw.choice([i for i, row in enumerate(rows) if not row.ended])
        parent = rows[at]
        keys = parent.hash_key_range
        middle = (keys.start + keys.end) // 2
        rows[at] = parent.with_(checkpoint=SHARD_END)
        for start, end in ((keys.start, middle), (middle + 1, keys.end)):
            name = f"shardId-{len(rows):012d}"
            key = parent.lease_key.replace(parent.shard_id, name)
            parents = frozenset({parent.shard_id})
            half = HashKeyRange(start, end)
            rows.append(parent.with_(lease_key=key, hash_key_range=half, parent_shard_ids=parents))
    return rows


def test_the_shards_are_boxes_by_reshard_and_hash_keys():
    found = boxes(split(leases(2, ["a"]), 2, seed=1))
    assert [(box.generation, box.low, box.state) for box in found][:2] == [
        (0, 0.0, found[0].state),
        (0, 0.5, found[1].state),
    ]
    assert {box.generation for box in found} >= {0, 1}
    assert sum(box.high - box.low for box in found if box.state == "read") == pytest.approx(1.0)
    merged = leases(1, [None])[0].with_(
        lease_key="shardId-000000000009",
        parent_shard_ids=frozenset(box.lease.shard_id for box in found if box.state == "read"),
    )
    last = boxes([*(box.lease for box in found), merged])[-1]
    assert (last.generation, last.state) == (max(box.generation for box in found) + 1, "no owner")


def test_the_stream_with_the_most_reshards_is_drawn_by_name():
    rows = leases(9, ["a"], "1:clicks:5") + split(leases(2, ["a"], "1:orders:5"), 3)
    stream = stream_to_draw(rows)
    assert stream == "1:orders:5"
    shown = svg_text(draw_shards(rows, stream))
    assert {"Shards of orders", "read (5)", "finished (3)"} <= set(shown)
    assert stream_to_draw([]) is None


def test_parents_in_a_circle_do_not_hang():
    one, two = leases(2, ["a"])
    rows = [
        one.with_(parent_shard_ids=frozenset({two.shard_id})),
        two.with_(parent_shard_ids=frozenset({one.shard_id})),
    ]
    assert len(boxes(rows)) == 2


def test_many_shards_fit_into_one_figure():
    rows = split(leases(200, ["a", None]), 200)
    assert len(boxes(rows)) == MAX_SHARDS
    assert sum(not box.lease.ended for box in boxes(rows)) == MAX_SHARDS
    uri = draw_shards(rows, None)
    assert len(uri) <= drawing.MAX_BYTES


def test_text_of_other_parties_is_shown_as_it_is():
    uri = draw_lag({HOSTILE: [(0.0, 1.0), (60.0, 2.0)]})
    assert b"<script" not in base64.b64decode(uri.partition(",")[2])
    assert any("frac" in one and "script" in one for one in svg_text(uri))
    rows = [row.with_(stream=f"1:{HOSTILE}:5") for row in leases(2, ["a"])]
    svg_text(draw_shards(rows, rows[0].stream))


IMAGE = re.compile(r"!\[([^]]+)\]\(data:image/[a-z+]+;base64,[A-Za-z0-9+/=]+\)")


class Fleet:
    def __init__(self, instance):
        given, plan = planned(3)
        rows = leases(4, ["orders-0"])
        report = led(rows, lagging(2), plan=plan, plan_input=given)
        self.stage = Stage(instance, FakePipeline(cycle=FakeCycle([report])))

    def figures(self, seconds: float = 61.0) -> str | None:
        for event in self.stage(seconds).asset_events:
            if isinstance(event, dg.AssetObservation) and event.asset_key.path[-1] == "fleet":
                found = event.metadata.get("figures")
                return None if found is None else found.value
        raise AssertionError("no report of the fleet")


def test_the_figures_are_drawn_when_their_history_doubles_then_every_ten_minutes(instance):
    fleet = Fleet(instance)
    assert fleet.figures() is None, "one observation is no line"
    first = fleet.figures()
    assert IMAGE.findall(first) == [
        "Lag by worker",
        "Load before and after the last plan",
        "Shards over reshards",
    ]
    growing = [bool(IMAGE.search(fleet.figures())) for _ in range(15)]
    assert [n for n, is_drawn in enumerate(growing, 1) if is_drawn] == [1, 3, 7, 15], "doubled"
    drawn = fleet.stage.clock.now
    later = [fleet.figures() for _ in range(20)]
    assert sum(bool(IMAGE.search(one)) for one in later) == 2
    assert fleet.stage.clock.now - drawn < 3 * FIGURES_SECONDS
    match = re.fullmatch(
        r"\[of \d\d:\d\d UTC\]\(/assets/orders-eu/fleet\?view=events&time=(\d+)\)", later[0]
    )
    # The event with the images was stored before the tick that reports next, however long it took.
    assert abs(int(match[1]) - (drawn + 61.0) * 1000) < 1_000
    assert later[0] == later[1], "later reports link to the same event"


def test_figures_without_a_lag_are_drawn_again_when_the_first_lag_is_known(instance):
    fleet = Fleet(instance)
    known = fleet.stage.pipeline.cycle.reports[0]
    starting = tuple(replace(one, status=WorkerStatus()) for one in known.workers)
    fleet.stage.pipeline.cycle.reports[0] = replace(known, workers=starting)
    assert [bool(IMAGE.search(fleet.figures() or "")) for _ in range(4)] == [
        *(False, False, True, False)
    ]
    fleet.stage.pipeline.cycle.reports[0] = known
    drawn = [bool(IMAGE.search(fleet.figures())) for _ in range(8)]
    assert drawn == [False, True, *[False] * 4, True, False], "at once, then when it has doubled"


def test_without_the_extra_there_are_no_figures(instance, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fleet = Fleet(instance)
    assert [fleet.figures() for _ in range(3)] == [None] * 3


def test_a_figure_that_cannot_be_drawn_does_not_stop_the_leader(instance, monkeypatch, caplog):
    def broken(_):
        raise ValueError("no fonts")

    monkeypatch.setattr(report, "draw_lag", broken)
    fleet = Fleet(instance)
    assert [fleet.figures() for _ in range(2)] == [None] * 2
    assert "cannot draw the figures" in caplog.text
