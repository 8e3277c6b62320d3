"""The calls of PutMetricData, and what the embedded CloudWatch has afterwards."""

from __future__ import annotations

import threading
from typing import Any
from urllib.parse import urlencode

import pytest

from kcl_pipeline import AwsClients, ConsumerSettings, EmbeddedAws, SessionOptions
from kcl_pipeline import events as ev
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config.metrics import MetricsSettings
from kcl_pipeline.metrics.exporters.cloudwatch import CloudWatchExporter
from kcl_pipeline.metrics.feed import MetricsFeed
from kcl_pipeline.metrics.instruments import INSTRUMENTS
from kcl_pipeline.testing.clock import VirtualClock
from tests.support.event_samples import SAMPLES, lag_measured

WAIT_SECONDS = 30.0


class Client:
    """Takes calls; `gate` holds them back, `error` fails them."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.called = threading.Event()
        self.error: Exception | None = None

    def put_metric_data(self, **given: Any) -> None:
        self.entered.set()
        assert self.gate.wait(WAIT_SECONDS)
        self.calls.append(given)
        self.called.set()
        if self.error is not None:
            raise self.error

    @property
    def data(self):
        return [datum for call in self.calls for datum in call["MetricData"]]


class Exported:
    def __init__(self, client: Client | None = None, **settings: Any) -> None:
        self.client = client or Client()
        self.settings = MetricsSettings(**{"metrics_buffer_time_millis": 2**31 - 1} | settings)
        self.events: list[ev.Event] = []
        self.clock = VirtualClock()
        self.exporter = CloudWatchExporter(
            lambda: self.client, "orders", self.settings, self.clock, self.events.append
        )
        self.feed = MetricsFeed([self.exporter], self.settings, self.clock, self.events.append)


def test_every_documented_instrument_is_in_the_embedded_cloudwatch():
    settings = ConsumerSettings(application_name="orders", streams=("orders",))
    with EmbeddedAws() as aws:
        options = SessionOptions(
            region_name=aws.region,
            endpoint_url=aws.endpoint_url,
            aws_access_key_id="local",
            aws_secret_access_key="local",
        )
        clients = AwsClients(settings, options)
        clock, events = SystemClock(), []
        exporter = CloudWatchExporter(
            lambda: clients.cloudwatch, "orders", settings.metrics, clock, events.append
        )
        feed = MetricsFeed([exporter], settings.metrics, clock, events.append)
        for event in SAMPLES:
            feed(event)
        feed.close(WAIT_SECONDS)
        assert events == []
        pages = clients.cloudwatch.get_paginator("list_metrics").paginate(Namespace="orders")
        metrics = [metric for page in pages for metric in page["Metrics"]]
        found = {
            (one["MetricName"], dimensions["Operation"])
            for one in metrics
            for dimensions in [{d["Name"]: d["Value"] for d in one["Dimensions"]}]
        }
        clients.close()
    assert found == {(one.name, one.operation) for one in INSTRUMENTS}


def test_values_of_one_metric_are_one_statistic_set():
    exported = Exported()
    for millis in (30.0, 10.0, 50.0):
        exported.feed(ev.ReadFinished("1:orders:9:shardId-1", millis, succeeded=True))
    exported.feed.close(WAIT_SECONDS)
    (call,) = exported.client.calls
    assert call["Namespace"] == "orders"
    (time,) = [one for one in call["MetricData"] if one["MetricName"].endswith("Time")]
    assert time["Unit"] == "Milliseconds"
    assert time["StatisticValues"] == {
        "SampleCount": 3,
        "Sum": 90.0,
        "Minimum": 10.0,
        "Maximum": 50.0,
    }
    assert time["Dimensions"] == [
        {"Name": "Operation", "Value": "ProcessTask"},
        {"Name": "ShardId", "Value": "shardId-1"},
        {"Name": "StreamId", "Value": "1:orders:9"},
    ]


def test_a_call_carries_a_thousand_metrics():
    client = Client()
    client.gate.clear()
    exported = Exported(client)
    for operation in range(3):
        for number in range(800):
            exported.exporter.record(
                [INSTRUMENTS[operation].of(1.0, (("ShardId", f"shardId-{number:012d}"),))]
            )
    client.gate.set()
    exported.feed.close(WAIT_SECONDS)
    sizes = [len(call["MetricData"]) for call in client.calls]
    assert sum(sizes) == 2400
    assert len(sizes) <= 4, sizes
    assert max(sizes) <= 1000


def test_a_call_with_long_names_stays_below_the_limit_of_cloudwatch():
    exported = Exported()
    values = [
        INSTRUMENTS[0].of(1.0, (("StreamId", f"{number:04d}" + "%" * 1100),))
        for number in range(900)
    ]
    exported.exporter.record(values)
    exported.feed.close(WAIT_SECONDS)
    assert sum(len(call["MetricData"]) for call in exported.client.calls) == 900
    for call in exported.client.calls:
        encoded = urlencode([(str(n), str(one)) for n, one in enumerate(call["MetricData"])])
        assert len(encoded) < 1_000_000


def test_values_are_sent_when_enough_metrics_wait():
    exported = Exported(publisher_flush_buffer=3)
    exported.feed(lag_measured({"a": 1, "b": 2}))
    assert exported.client.called.wait(WAIT_SECONDS)
    exported.feed.close(WAIT_SECONDS)


def test_values_are_sent_once_per_buffer_time():
    exported = Exported(metrics_buffer_time_millis=10)
    exported.feed(ev.MoveRefused("a", "w2"))
    assert exported.client.called.wait(WAIT_SECONDS)
    exported.feed.close(WAIT_SECONDS)


def test_a_call_that_hangs_blocks_no_worker_and_the_queue_is_bounded():
    client = Client()
    client.gate.clear()
    exported = Exported(client, metrics_max_queue_size=20, publisher_flush_buffer=1)
    exported.feed(ev.MoveRefused("a", "w2"))
    assert client.entered.wait(WAIT_SECONDS)
    for number in range(100):
        exported.feed(lag_measured({f"shardId-{number}": number}))
    clock = SystemClock()
    began = clock.monotonic()
    exported.feed.close(0.05)
    assert clock.monotonic() - began < WAIT_SECONDS / 3
    left = [one for one in exported.events if isinstance(one, ev.MetricsDropped)]
    assert [(one.exporter, "at the end" in one.reason) for one in left] == [("cloudwatch", True)]
    assert 20 <= left[0].values < 200
    client.gate.set()
    exported.exporter._thread.join(WAIT_SECONDS)
    dropped = [one for one in exported.events if isinstance(one, ev.MetricsDropped)][1:]
    assert [one.reason for one in dropped] == [
        "more than 20 metrics waited (metrics_max_queue_size)"
    ]
    sent = sum(one["StatisticValues"]["SampleCount"] for one in client.data)
    assert sent + left[0].values + dropped[0].values == 1 + 200


def test_a_full_queue_drops_the_oldest():
    client = Client()
    client.gate.clear()
    exported = Exported(client, metrics_max_queue_size=20, metrics_level="DETAILED")
    for number in range(30):
        exported.feed(ev.ReadFinished(f"shardId-{number}", 1.0, succeeded=True))
    client.gate.set()
    exported.feed.close(WAIT_SECONDS)
    shards = {one["Dimensions"][1]["Value"] for one in client.data}
    assert shards == {f"shardId-{number}" for number in range(20, 30)}
    assert exported.events == [
        ev.MetricsDropped("cloudwatch", 40, "more than 20 metrics waited (metrics_max_queue_size)")
    ]


def test_a_failed_call_is_an_event_and_the_next_values_are_sent():
    exported = Exported(publisher_flush_buffer=1)
    exported.client.error = RuntimeError("no network")
    exported.feed(ev.MoveRefused("a", "w2"))
    assert exported.client.called.wait(WAIT_SECONDS)
    exported.client.error = None
    exported.feed(ev.MoveRefused("a", "w2"))
    exported.feed.close(WAIT_SECONDS)
    assert exported.events == [ev.MetricsDropped("cloudwatch", 1, "RuntimeError: no network")]


@pytest.mark.parametrize(
    ("enabled", "names"),
    [
        (("ALL",), {"Operation", "ShardId", "StreamId", "WorkerIdentifier"}),
        (("Operation",), {"Operation"}),
        (("WorkerIdentifier",), {"Operation", "WorkerIdentifier"}),
        (("ShardId", "Operation"), {"Operation", "ShardId"}),
    ],
)
def test_only_enabled_dimensions_are_sent(enabled, names):
    exported = Exported(metrics_enabled_dimensions=enabled)
    exported.feed(ev.ReadFinished("1:orders:9:shardId-1", 1.0, succeeded=True))
    exported.feed(ev.LeaseLost("w1", "shardId-1", "late"))
    exported.feed.close(WAIT_SECONDS)
    assert {d["Name"] for one in exported.client.data for d in one["Dimensions"]} == names


def test_values_of_dimensions_are_what_cloudwatch_takes():
    exported = Exported()
    exported.feed(ev.LeaseLost("wörker\n", "shardId-1", "late"))
    exported.feed(ev.LeaseLost("", "shardId-1", "late"))
    exported.feed.close(WAIT_SECONDS)
    values = {d["Value"] for one in exported.client.data for d in one["Dimensions"]}
    assert values == {"RenewAllLeases", "w?rker?", "-"}
