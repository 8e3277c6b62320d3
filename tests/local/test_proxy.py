"""A proxy in the environment is not asked for addresses of this host."""

from __future__ import annotations

import boto3
import pytest
import requests

from kcl_pipeline import AwsClients, ConsumerSettings, EmbeddedAws, SessionOptions
from kcl_pipeline.cli.local import serve
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.local.demo.dagster_client import DagsterClient
from kcl_pipeline.local.demo.processes import Processes, free_port
from kcl_pipeline.local.demo.run import DemoOptions, run_demo
from kcl_pipeline.local.no_proxy import no_proxy_variables

PROXY = "http://127.0.0.1:9"  # nobody listens there
SETTINGS = ConsumerSettings(application_name="orders", streams=("orders",))


@pytest.fixture
def aws(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, PROXY)
    with EmbeddedAws() as server:
        yield server


def test_the_clients_of_a_worker_reach_an_endpoint_of_this_host(aws, monkeypatch):
    for name, value in aws.environment().items():
        if "proxy" not in name.lower():
            monkeypatch.setenv(name, value)
    clients = AwsClients(SETTINGS, SessionOptions())
    assert clients.kinesis.list_streams()["StreamNames"] == []
    assert clients.dynamodb.list_tables()["TableNames"] == []
    named = AwsClients(SETTINGS, SessionOptions(endpoint_url=aws.endpoint_url))
    assert named.kinesis.list_streams()["StreamNames"] == []
    clients.close()
    named.close()


def test_the_embedded_aws_creates_its_streams_and_excludes_itself(aws, monkeypatch, capsys):
    stop = SystemClock().signal()
    stop.set()
    serve(aws, [("orders", 2)], stop)
    assert "export no_proxy=127.0.0.1,localhost,::1" in capsys.readouterr().err
    for name, value in aws.environment().items():
        monkeypatch.setenv(name, value)
    assert boto3.client("kinesis").list_streams()["StreamNames"] == ["orders"]


def test_the_exclusions_of_the_user_stay():
    given = {"HTTPS_PROXY": PROXY, "no_proxy": "corp.example, 10.0.0.1", "NO_PROXY": "other"}
    hosts = "corp.example,10.0.0.1,127.0.0.1,localhost,::1"
    assert no_proxy_variables(given) == {"no_proxy": hosts, "NO_PROXY": hosts}
    assert no_proxy_variables({"NO_PROXY": "other"}) == {}


def test_the_demonstration_reaches_the_page_of_this_host(aws):
    with pytest.raises(requests.HTTPError):  # the embedded AWS has no such page
        DagsterClient(aws.endpoint_url).runs("orders_consume")


def test_the_processes_of_the_demonstration_exclude_this_host(aws, tmp_path):
    processes = Processes(tmp_path, SystemClock())
    try:
        processes.start_aws(free_port(4566))
        assert processes.environment["no_proxy"] == "127.0.0.1,localhost,::1"
    finally:
        processes.stop_all()


def test_a_demonstration_that_cannot_start_ends_with_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(Processes, "start_aws", lambda self, port: PROXY)
    said: list[str] = []
    found = run_demo(DemoOptions(folder=tmp_path / "run"), SystemClock(), said.append)
    assert not found.exact
    assert "127.0.0.1:9" in (found.failure or "")
    assert said[-1] == f"failed: {found.failure}"
