"""Values of events in OpenTelemetry's in-memory reader."""

from __future__ import annotations

import sys

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Gauge, Histogram, InMemoryMetricReader, Sum

from kcl_pipeline import events as ev
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.metrics.exporters.otel import SCOPE, OtelExporter
from kcl_pipeline.metrics.instruments import INSTRUMENTS, Kind, Level, otel_name
from tests.support.event_samples import lag_measured
from tests.support.metrics_world import FedExporter

TYPES = {Kind.COUNTER: Sum, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}


class Otel:
    def __init__(self, **settings):
        self.reader = InMemoryMetricReader()
        provider = MeterProvider([self.reader])
        meter = provider.get_meter(SCOPE)
        self.fed = FedExporter(lambda *_: OtelExporter(meter), **settings)

    def read(self):
        """Return {(name, operation): (type, unit, [(attributes, point)])}."""
        found = {}
        for resource in self.reader.get_metrics_data().resource_metrics:
            for scope in resource.scope_metrics:
                assert scope.scope.name == "software.amazon.kinesis"
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        attributes = dict(point.attributes)
                        key = (metric.name, attributes["aws.kinesis.operation"])
                        entry = found.setdefault(key, (type(metric.data), metric.unit, []))
                        entry[2].append((attributes, point))
        return found


def test_every_documented_instrument_is_emitted():
    otel = Otel()
    otel.fed.feed_samples()
    found = otel.read()
    assert found.keys() == {(otel_name(one.name), one.operation) for one in INSTRUMENTS}
    for one in INSTRUMENTS:
        kind, unit, _ = found[(otel_name(one.name), one.operation)]
        assert (kind, unit) == (TYPES[one.kind], one.unit.value.ucum)
    assert otel.fed.events == []


def test_level_summary_emits_its_instruments_without_shards():
    otel = Otel(metrics_level="SUMMARY")
    otel.fed.feed_samples()
    found = otel.read()
    assert found.keys() == {
        (otel_name(one.name), one.operation) for one in INSTRUMENTS if one.level is Level.SUMMARY
    }
    attributes = [set(given) for _, _, points in found.values() for given, _ in points]
    assert not any("aws.kinesis.shard.id" in names for names in attributes)


def test_values_and_attributes():
    otel = Otel()
    otel.fed.feed(ev.LeaseGained("w1", "shardId-1", 1))
    otel.fed.feed(ev.LeaseGained("w1", "shardId-2", 1))
    otel.fed.feed(lag_measured({"1:orders:9:shardId-1": 1500}))
    found = otel.read()
    worker = {"aws.kinesis.operation": "RenewAllLeases", "aws.kinesis.consumer.name": "w1"}
    ((attributes, point),) = found[("aws.kinesis.client.current_leases", "RenewAllLeases")][2]
    assert (attributes, point.value) == (worker, 2)
    ((attributes, point),) = found[("aws.kinesis.client.consumer.lag.duration", "ProcessTask")][2]
    assert (attributes, point.sum, point.count) == (
        {
            "aws.kinesis.operation": "ProcessTask",
            "aws.kinesis.shard.id": "shardId-1",
            "aws.kinesis.stream_name": "1:orders:9",
        },
        1500,
        1,
    )


def test_without_a_provider_nothing_is_recorded_and_nothing_fails():
    fed = FedExporter(lambda *_: OtelExporter())
    fed.feed_samples()
    fed.feed.close()
    assert fed.events == []


def test_without_opentelemetry_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(SettingsError, match=r"kcl-pipeline\[otel\]"):
        OtelExporter()
