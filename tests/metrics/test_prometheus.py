"""The text that the Prometheus endpoint serves."""

from __future__ import annotations

import socket
import sys
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kcl_pipeline import events as ev
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.metrics.exporters.prometheus import PrometheusExporter, families
from kcl_pipeline.metrics.feed import FORGET_SECONDS
from kcl_pipeline.metrics.instruments import INSTRUMENTS, SHARD, Kind, Level, prometheus_name
from tests.support.event_samples import lag_measured
from tests.support.metrics_world import FedExporter

LAG = "aws_kinesis_client_consumer_lag_duration_milliseconds"


def scraped(exporter):
    """Return {family name: [(sample name, labels, value)]} and the types."""
    with urllib.request.urlopen(exporter.address, timeout=10) as response:
        text = response.read().decode()
    found, types = {}, {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        types[name] = family.type
        found[name] = [(one.name, one.labels, one.value) for one in family.samples]
    return found, types


def made(settings, events):
    return PrometheusExporter("orders", "w1", settings, events)


@pytest.fixture
def fed():
    fed = FedExporter(made, prometheus_port=0)
    yield fed
    fed.feed.close()


def test_every_documented_instrument_is_emitted(fed):
    fed.feed_samples()
    found, types = scraped(fed.exporter)
    assert {
        (name, labels["operation"]) for name, samples in found.items() for _, labels, _ in samples
    } == {(prometheus_name(one), one.operation) for one in INSTRUMENTS}
    for family in families().values():
        assert types[family.name] == str(family.kind)
        for name, labels, _ in found[family.name]:
            assert not name.endswith("_created")
            assert set(labels) - {"le"} == set(family.labels)
            assert (labels["application"], labels["worker"]) == ("orders", "w1")
    assert fed.events == [ev.MetricsEndpointOpened("prometheus", fed.exporter.address)]


def test_values(fed):
    fed.feed(lag_measured({"shardId-1": 1500, "shardId-2": 7}))
    fed.feed(lag_measured({"shardId-1": 900, "shardId-2": 8}))
    fed.feed(ev.ReadFinished("shardId-1", 12.0, succeeded=True))
    fed.feed(ev.ReadFinished("shardId-2", 30.0, succeeded=False))
    found, _ = scraped(fed.exporter)
    assert {(labels["operation"], labels["shard"]): value for _, labels, value in found[LAG]} == {
        ("ProcessTask", "shardId-1"): 900,
        ("ProcessTask", "shardId-2"): 8,
        ("ApplicationTracker", ""): 900,
    }
    reads = "aws_kinesis_client_kinesis_data_fetcher_get_records"
    assert {labels["shard"]: value for _, labels, value in found[f"{reads}_success_total"]} == {
        "shardId-1": 1,
        "shardId-2": 0,
    }
    times = {name: value for name, _, value in found[f"{reads}_duration_milliseconds"]}
    assert times[f"{reads}_duration_milliseconds_sum"] == 42
    assert times[f"{reads}_duration_milliseconds_count"] == 2


def test_histograms_have_no_label_of_the_shard():
    for family in families().values():
        assert family.kind is not Kind.HISTOGRAM or SHARD not in family.dimensions


def test_level_summary_has_no_shards_and_the_largest_lag():
    fed = FedExporter(made, prometheus_port=0, metrics_level="SUMMARY")
    try:
        fed.feed(lag_measured({"shardId-1": 5, "shardId-2": 70, "shardId-3": 6}))
        fed.feed_samples()
        found, _ = scraped(fed.exporter)
    finally:
        fed.feed.close()
    assert found.keys() == {
        prometheus_name(one) for one in INSTRUMENTS if one.level is Level.SUMMARY
    }
    assert all(not labels.get("shard") for samples in found.values() for _, labels, _ in samples)


def test_of_several_shards_in_one_series_the_largest_lag_counts():
    fed = FedExporter(made, prometheus_port=0, metrics_level="SUMMARY")
    try:
        fed.feed(lag_measured({"shardId-1": 5, "shardId-2": 70, "shardId-3": 6}))
        found, _ = scraped(fed.exporter)
    finally:
        fed.feed.close()
    assert {value for _, _, value in found[LAG]} == {70}


def test_series_of_a_shard_that_is_not_held_any_more_are_removed(fed):
    fed.feed_samples()
    fed.clock.advance(FORGET_SECONDS / 2)
    fed.feed(lag_measured({"shardId-2": 0}))
    found, _ = scraped(fed.exporter)
    assert "shardId-1" in str(found)
    assert {labels["shard"] for _, labels, _ in found[LAG]} == {"shardId-2", ""}
    fed.clock.advance(FORGET_SECONDS / 2)
    fed.feed(lag_measured({"shardId-2": 0}))
    found, _ = scraped(fed.exporter)
    shards = {labels.get("shard") for samples in found.values() for _, labels, _ in samples}
    assert shards == {"shardId-2", "", None}
    fed.feed_samples()
    assert "shardId-1" in str(scraped(fed.exporter))


def test_a_process_that_does_not_lead_any_more_has_no_gauges_of_the_leader(fed):
    led = ev.CycleFinished("w1", True, 30.0, True, leases=4, unowned=3, workers=2, streams=1)
    fed.feed(led)
    before = scraped(fed.exporter)[0]
    fed.feed(ev.CycleFinished("w1", False, 1.0, True))
    after = scraped(fed.exporter)[0]
    gone = {name for name, samples in before.items() if samples and not after[name]}
    gauges = {one for one in INSTRUMENTS if one.events.keys() == {ev.CycleFinished}}
    assert gone == {prometheus_name(one) for one in gauges if one.kind is Kind.GAUGE}
    fed.feed(led)
    assert scraped(fed.exporter)[0]["aws_kinesis_client_unowned_leases"][0][2] == 3


def test_processes_of_one_host_use_the_next_free_port():
    first = FedExporter(made, prometheus_port=0)
    port = int(first.exporter.address.rsplit(":", 1)[1].removesuffix("/metrics"))
    second = FedExporter(made, prometheus_port=port, prometheus_port_count=50)
    try:
        assert second.exporter.address != first.exporter.address
        with pytest.raises(OSError, match=r"metrics\.prometheus_port"):
            FedExporter(made, prometheus_port=port, prometheus_port_count=1)
    finally:
        first.feed.close()
        second.feed.close()


def test_the_endpoint_is_closed(fed):
    fed.feed.close()
    host, port = fed.exporter.address.removeprefix("http://").removesuffix("/metrics").split(":")
    assert host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError), socket.create_connection((host, int(port)), 5):
        pass


def test_without_the_library_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SettingsError, match=r"kcl-pipeline\[prometheus\]"):
        FedExporter(made, prometheus_port=0)
