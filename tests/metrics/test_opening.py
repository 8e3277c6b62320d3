"""Metrics of a real worker and a real leader, switched on by settings."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import urllib.request

import pytest

from kcl_pipeline import AwsClients, DeltaSink, EmbeddedAws, KinesisPipeline, SessionOptions
from kcl_pipeline import events as ev
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.metrics import opening

RECORDS = 40


@pytest.fixture(scope="module")
def aws():
    with EmbeddedAws() as aws:
        yield aws


class Application:
    def __init__(self, aws, tmp_path, name, **metrics):
        fast = {
            "lease": {"failover_time_millis": 1_000},
            "leader": {"leader_lease_duration_millis": 500, "leader_heartbeat_period_millis": 100},
            "metrics": metrics,
        }
        self.pipeline = KinesisPipeline(
            name, [name], DeltaSink(str(tmp_path / "raw")), settings_overrides=fast
        )
        options = SessionOptions(
            endpoint_url=aws.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )
        self.clients = AwsClients(self.pipeline.settings, options)
        self.clients.kinesis.create_stream(StreamName=name, ShardCount=2)
        self.clients.kinesis.put_records(
            StreamName=name,
            Records=[{"Data": b"abcde", "PartitionKey": f"{n}"} for n in range(RECORDS)],
        )
        self.events = []
        self.text = ""

    def note(self, event):
        self.events.append(event)
        if isinstance(event, ev.WorkerStopped) and self.address:
            self.text = scrape(self.address)

    @property
    def address(self):
        found = [one.address for one in self.events if isinstance(one, ev.MetricsEndpointOpened)]
        return found[-1] if found else None

    def drain(self):
        worker = self.pipeline.build_worker("w-1", clients=self.clients, events=self.note)
        return worker.run(threading.Event(), mode="drain")


def scrape(address):
    with urllib.request.urlopen(address, timeout=10) as response:
        return response.read().decode()


def total(text, name, **labels):
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = [one for one in text.splitlines() if one.startswith(f"{name}{{")]
    return sum(float(one.split()[-1]) for one in lines if all(label in one for label in wanted))


def threads():
    return {one.name for one in threading.enumerate() if one.name.startswith("metrics-")}


def test_a_worker_serves_what_it_does_until_it_stops(aws, tmp_path):
    app = Application(aws, tmp_path, "served", metrics_backends=["prometheus"], prometheus_port=0)
    summary = app.drain()
    assert summary.total.records == RECORDS
    prefix, mine = "aws_kinesis_client", {"application": "served", "worker": "w-1"}
    assert total(app.text, f"{prefix}_records_processed_total", **mine) == RECORDS
    assert total(app.text, f"{prefix}_records_size_bytes_total", **mine) == 5 * RECORDS
    success = f"{prefix}_success_total"
    for operation in ("ProcessTask", "RenewAllLeases", "LeaseDiscovery", "LeaseAssignmentManager"):
        assert total(app.text, success, operation=operation) > 0, operation
    assert total(app.text, f"{prefix}_total_leases", **mine) == 2
    assert f'{prefix}_consumer_lag_duration_milliseconds{{application="served"' in app.text
    assert total(app.text, f"{prefix}_initialize_success_total") == 1
    assert not [one for one in app.events if isinstance(one, ev.MetricsExportFailed)]
    port = int(app.address.removesuffix("/metrics").rsplit(":", 1)[1])
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 5):
        pass


def test_a_worker_sends_everything_to_cloudwatch_before_it_ends(aws, tmp_path):
    app = Application(aws, tmp_path, "sent", metrics_backends=["cloudwatch"])
    app.drain()
    assert threads() == set()
    assert not [one for one in app.events if isinstance(one, ev.MetricsDropped)]
    metrics = app.clients.cloudwatch.list_metrics(Namespace="sent", MetricName="RecordsProcessed")
    dimensions = [
        {one["Name"]: one["Value"] for one in metric["Dimensions"]} for metric in metrics["Metrics"]
    ]
    assert {one["ShardId"] for one in dimensions} == {
        "shardId-000000000000",
        "shardId-000000000001",
    }
    assert all(one.keys() == {"Operation", "ShardId"} for one in dimensions)


def test_the_leader_of_a_code_location_has_one_endpoint(aws, tmp_path):
    app = Application(aws, tmp_path, "led", metrics_backends=["prometheus"], prometheus_port=0)
    app.pipeline.ensure_tables(clients=app.clients)
    try:
        for _ in range(2):
            leader = app.pipeline.build_leader(
                "dagster/leader", resume_own_name=True, clients=app.clients, events=app.note
            )
            assert leader.run_once().led
        opened = [one for one in app.events if isinstance(one, ev.MetricsEndpointOpened)]
        assert len(opened) == 1
        text = scrape(app.address)
        mine = {"application": "led", "worker": "dagster/leader"}
        name = "aws_kinesis_client_success_total"
        assert total(text, name, operation="LeaseAssignmentManager", **mine) == 2
        assert total(text, "aws_kinesis_client_leader_decider_is_leader", **mine) == 1
    finally:
        for key in [key for key in opening._leaders if key[0] == "led"]:
            opening._leaders.pop(key).close()


def test_a_port_that_is_not_free_is_an_event_and_the_worker_runs(aws, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        app = Application(
            aws,
            tmp_path,
            "busy",
            metrics_backends=["prometheus", "otel"],
            prometheus_port=taken.getsockname()[1],
            prometheus_port_count=1,
        )
        assert app.drain().total.records == RECORDS
    (failed,) = [one for one in app.events if isinstance(one, ev.MetricsExportFailed)]
    assert failed.exporter == "prometheus"
    assert "metrics.prometheus_port" in failed.error


@pytest.mark.parametrize(
    "metrics", [{}, {"metrics_backends": ["prometheus"], "metrics_level": "NONE"}]
)
def test_without_exporters_nothing_is_opened(aws, tmp_path, metrics):
    name = f"off-{len(metrics)}"
    app = Application(aws, tmp_path, name, **metrics)
    app.drain()
    assert app.address is None
    assert threads() == set()


@pytest.mark.parametrize("backend", ["prometheus", "otel"])
def test_a_missing_extra_is_named_before_anything_is_written(aws, tmp_path, monkeypatch, backend):
    app = Application(aws, tmp_path, f"missing-{backend}", metrics_backends=[backend])
    for name in ("prometheus_client", "opentelemetry", "opentelemetry.metrics"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SettingsError) as raised:
        app.drain()
    assert f"metrics.metrics_backends with '{backend}' needs an extra" in str(raised.value)
    assert f"pip install 'kcl-pipeline[{backend}]'" in str(raised.value)
    assert app.clients.dynamodb.list_tables()["TableNames"].count(f"missing-{backend}") == 0


def test_a_worker_without_exporters_loads_no_library_of_them():
    code = (
        "import sys, kcl_pipeline.metrics.opening, kcl_pipeline.pipeline\n"
        "from kcl_pipeline.metrics import feed\n"
        "found = [n for n in sys.modules if n.startswith(('prometheus_client', 'opentelemetry'))]\n"
        "assert not found, found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
