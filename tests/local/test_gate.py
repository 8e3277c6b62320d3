"""The embedded AWS answers SDKs on this machine and no web page."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError

from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.local.http.gate import is_loopback


def request(
    aws: EmbeddedAws, path: str, headers: Mapping[str, str], method: str = "GET", body: bytes = b""
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection(aws.endpoint_url.removeprefix("http://"), timeout=10)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()}
    finally:
        connection.close()


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:4566", "127.8.0.1", "localhost:1", "orders.localhost", "[::1]:80",
     "LocalHost:80", "[0:0:0:0:0:0:0:1]"],
)  # fmt: skip
def test_loopback_names(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    ["", "example.com", "127.0.0.1.example.com", "localhost.example.com", "10.0.0.1", "0.0.0.0",
     "127.0.0.1@example.com", "example.com/127.0.0.1", "127.0.0.1:x", "[::1", "notlocalhost",
     "[::1]example.com", "[::1]:80@example.com", "localhost,example.com", "[127.0.0.1", "[::]",
     "127.1", "[::ffff:10.0.0.1]", "localhost\n", "localhost:80:80"],
)  # fmt: skip
def test_other_names(host: str) -> None:
    assert not is_loopback(host)


def test_a_foreign_host_is_refused(aws: EmbeddedAws) -> None:
    for host in ("attacker.example", "attacker.example:80", "10.1.2.3"):
        assert request(aws, "/_local/health", {"Host": host})[0] == 403
    assert request(aws, "/_local/health", {})[0] == 200


@pytest.mark.parametrize("path", ["/_local/faults", "/_local/clock", "/", "/bucket/key"])
def test_a_request_of_a_foreign_page_is_refused(aws: EmbeddedAws, path: str) -> None:
    for headers in (
        {"Origin": "https://attacker.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        status, _, answered = request(aws, path, headers, "POST", b"[]")
        assert status == 403
        assert not [name for name in answered if name.startswith("access-control-")]
    assert aws.fault_rules.rules == []


def test_no_answer_allows_another_origin(aws: EmbeddedAws) -> None:
    own = {"Origin": aws.endpoint_url, "Sec-Fetch-Site": "same-origin"}
    for path in ("/_local/health", "/", "/bucket"):
        answered = request(aws, path, own)[2]
        assert not [name for name in answered if name.startswith("access-control-")]


@pytest.mark.parametrize(
    "path",
    [
        "/moto-api/reset",
        "/moto-api/recorder/replay-recording",
        "/moto-api/recorder/start-recording",
        "/moto-api/state-manager/set-transition",
        "/moto-api/data.json",
    ],
)
def test_motos_own_control_api_is_closed(
    aws: EmbeddedAws, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dynamodb = _client(aws, "dynamodb")
    key = [{"AttributeName": "id", "AttributeType": "S"}]
    name = "t" + path.rpartition("/")[2].replace(".", "-")
    dynamodb.create_table(
        TableName=name,
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        AttributeDefinitions=key,
        BillingMode="PAY_PER_REQUEST",
    )
    for method in ("POST", "GET"):
        request(aws, path, {}, method, b"{}")
    assert name in dynamodb.list_tables()["TableNames"]
    assert list(tmp_path.iterdir()) == []


def test_only_listed_services_are_served(aws: EmbeddedAws) -> None:
    with pytest.raises(ClientError, match="no service 'iam'"):
        _client(aws, "iam").list_users()
    with pytest.raises(ClientError, match="no service 'lambda'"):
        _client(aws, "lambda").list_functions()
    assert _client(aws, "sts").get_caller_identity()["Account"]
    _client(aws, "cloudwatch").list_metrics()
    _client(aws, "s3").list_buckets()


def _client(aws: EmbeddedAws, service: str):
    session = boto3.Session("local", "local", region_name="us-east-1")
    return session.client(service, endpoint_url=aws.endpoint_url)
