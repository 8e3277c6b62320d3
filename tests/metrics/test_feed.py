"""The level, the dimensions and the number of series."""

from __future__ import annotations

import pytest

from kcl_pipeline import events as ev
from kcl_pipeline.config.metrics import MetricsSettings
from kcl_pipeline.metrics import feed as feed_module
from kcl_pipeline.metrics.feed import MAX_TEXTS, Dimensions, MetricsFeed
from kcl_pipeline.metrics.instruments import observations
from kcl_pipeline.testing.clock import VirtualClock
from tests.support.event_samples import SAMPLES, lag_measured


class Recorder:
    name = "recorder"

    def __init__(self):
        self.values, self.forgotten, self.closed = [], [], []

    def record(self, values):
        self.values.extend(values)

    def forget(self, is_gone):
        self.forgotten.append(
            [one for one in self.values if is_gone(one.instrument, one.attributes)]
        )

    def close(self, seconds):
        self.closed.append(seconds)


class Broken(Recorder):
    name = "broken"

    def record(self, values):
        raise RuntimeError("full disk")


def test_shards_above_the_bound_share_one_series(monkeypatch):
    monkeypatch.setattr(feed_module, "MAX_SHARDS", 3)
    dimensions = Dimensions(MetricsSettings(), VirtualClock())
    values = observations(lag_measured({f"s{n}": n for n in range(6)}))
    found = [dict(one.attributes).get("ShardId") for one in dimensions.applied(values)]
    assert found == ["s5", "s4", "s3", "other", "other", "other", None]


def test_a_forgotten_shard_makes_room(monkeypatch):
    monkeypatch.setattr(feed_module, "MAX_SHARDS", 1)
    clock = VirtualClock()
    recorder = Recorder()
    feed = MetricsFeed([recorder], MetricsSettings(), clock, lambda _: None)
    feed(lag_measured({"a": 1}))
    clock.advance(feed_module.FORGET_SECONDS)
    feed(lag_measured({"b": 2}))
    ((gone,),) = recorder.forgotten
    assert gone.attributes == (("ShardId", "a"),)
    feed(lag_measured({"b": 2}))
    shards = [dict(one.attributes).get("ShardId") for one in recorder.values]
    assert shards == ["a", None, "other", None, "b", None]


def test_the_series_of_a_stream_that_is_gone_end_and_it_makes_room(monkeypatch):
    monkeypatch.setattr(feed_module, "MAX_SHARDS", 2)
    clock, recorder = VirtualClock(), Recorder()
    feed = MetricsFeed([recorder], MetricsSettings(), clock, lambda _: None)

    def stream_of(event):
        feed(event)
        return dict(recorder.values[-2 if isinstance(event, ev.StatusMeasured) else -1].attributes)[
            "StreamId"
        ]

    assert stream_of(ev.StreamUnavailable("leader", "old", "no")) == "old"
    assert stream_of(lag_measured({"1:read:9:shardId-1": 1})) == "1:read:9"
    clock.advance(feed_module.FORGET_STREAM_SECONDS / 2)
    assert stream_of(ev.StreamUnavailable("leader", "new", "no")) == "other", "no room yet"
    assert stream_of(lag_measured({"1:read:9:shardId-1": 1})) == "1:read:9"
    clock.advance(feed_module.FORGET_STREAM_SECONDS / 2)
    assert stream_of(lag_measured({"1:read:9:shardId-1": 1})) == "1:read:9"
    assert [dict(one.attributes) for each in recorder.forgotten for one in each] == [
        {"StreamId": "old"}
    ]
    assert stream_of(ev.StreamUnavailable("leader", "new", "no")) == "new"


def test_texts_above_the_bound_share_one_series():
    dimensions = Dimensions(MetricsSettings(), VirtualClock())
    calls = set()
    for number in range(2 * MAX_TEXTS):
        (one,) = dimensions.applied(observations(ev.AwsTrouble(f"call{number} of x", "no")))
        calls.add(dict(one.attributes)["Call"])
    assert len(calls) == MAX_TEXTS + 1
    assert "other" in calls


def test_an_exporter_that_raises_is_reported_once_and_does_not_affect_the_others():
    events, recorder = [], Recorder()
    feed = MetricsFeed([Broken(), recorder], MetricsSettings(), VirtualClock(), events.append)
    for event in SAMPLES:
        feed(event)
    assert len(recorder.values) > len(SAMPLES)
    assert events == [ev.MetricsExportFailed("broken", "RuntimeError: full disk")]


def test_closing_closes_every_exporter():
    first, second = Recorder(), Recorder()
    MetricsFeed([first, second], MetricsSettings(), VirtualClock(), lambda _: None).close(2.0)
    assert (first.closed, second.closed) == ([2.0], [2.0])


@pytest.mark.parametrize("level", ["SUMMARY", "DETAILED"])
def test_the_number_of_values_per_event_is_bounded(level):
    recorder = Recorder()
    feed = MetricsFeed(
        [recorder], MetricsSettings(metrics_level=level), VirtualClock(), lambda _: None
    )
    keys = tuple(f"shardId-{n}" for n in range(100))
    feed(
        ev.BatchCommitted(
            *("w1", "b", 100, 100, keys, {"write": 1.0, "commit": 1.0}, 1),
            dict.fromkeys(keys, 1),
            dict.fromkeys(keys, 1),
        )
    )
    assert len(recorder.values) == 501
