"""What a person may get wrong on the command line, and how it starts."""

import json
import os
import subprocess
import sys
import time

import boto3
import pytest
from typer.testing import CliRunner

from kcl_pipeline.aws import AwsClients, SessionOptions
from kcl_pipeline.cli import app
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.local.faults import FaultRule
from kcl_pipeline.local.shared import record_server
from tests.support.cli_fleet import run, run_json

pytest_plugins = ["tests.support.cli_fixtures"]
pytestmark = pytest.mark.usefixtures("environment")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--application is missing; write --application NAME, or --pipeline module:attribute"),
        (["-a", "x"], "--application='x' is too short. Write 3 to 230 of the characters"),
        (["-a", "one", "-s", "s", "-s", "s"], "names a stream twice"),
        (["-p", "nothing"], "'nothing' is not module:attribute"),
        (["-p", "no_such_module:x"], "there is no module 'no_such_module'"),
        (["-p", "json:no_such"], "json has no 'no_such'"),
        (["-p", "json:dumps"], "is a function; name a KinesisPipeline"),
        (["-p", "json:dumps", "-a", "app"], "remove --application and --stream"),
        (["-a", "no-such-app"], "check the names, AWS_REGION and AWS_ENDPOINT_URL"),
    ],
)
def test_user_errors_are_one_sentence(arguments, sentence):
    result = run("status", *arguments, code=1)
    assert sentence in result.stderr
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("folder", [".run", ".run/demo"])
def test_a_name_is_looked_up_in_the_embedded_aws_of_the_folder(
    shared, server, tmp_path, monkeypatch, folder
):
    """Of `dagster dev`, or of the demonstration: a user sets no variable."""
    (tmp_path / folder).mkdir(parents=True)
    record_server(tmp_path / folder, os.getpid(), server.endpoint_url, server.environment())
    monkeypatch.chdir(tmp_path)
    found = run("status", "-a", "no-such-app", code=1).stderr
    assert "this is the embedded AWS" not in found, "the variables name an account"
    for name in server.environment():
        monkeypatch.delenv(name)
    found = run("status", "-a", shared.name)
    assert found.stderr == f"this is the embedded AWS of this folder, at {server.endpoint_url}\n"
    assert "blue-1" in found.stdout


def test_a_pipeline_module_that_fails_is_named_with_file_and_line(tmp_path, monkeypatch):
    (tmp_path / "broken_pipeline.py").write_text("x = 1\ny = x / 0\n")
    monkeypatch.chdir(tmp_path)
    assert (
        "broken_pipeline raised ZeroDivisionError: division by zero"
        in run("status", "-p", "broken_pipeline:x", code=1).stderr
    )


def test_a_pipeline_gives_its_settings(shared, tmp_path, monkeypatch):
    (tmp_path / "my_pipeline.py").write_text(
        "from types import SimpleNamespace\nfrom kcl_pipeline.config import ConsumerSettings\n"
        f"settings = ConsumerSettings(application_name={shared.name!r}, streams=('s',))\n"
        "project = SimpleNamespace(pipeline=SimpleNamespace(settings=settings))\n"
    )
    monkeypatch.chdir(tmp_path)
    assert len(run_json("status", "-p", "my_pipeline:project.pipeline")["leases"]) == 4


def test_no_credentials(monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert (
        "no AWS credentials were found; set AWS_ACCESS_KEY_ID"
        in run("status", "-a", "some-app", code=1).stderr
    )
    text = run("doctor", "-a", "some-app", "-s", "some", code=1).stdout
    assert "problem credentials: not found" in text
    assert "tables and streams were not checked" in text


def test_no_region(monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    assert "no AWS region is set; set AWS_REGION" in run("status", "-a", "some-app", code=1).stderr


def test_unknown_profile(monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody-has-this")
    assert "nobody-has-this" in run("status", "-a", "some-app", code=1).stderr


def test_an_endpoint_where_nobody_listens(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "check AWS_ENDPOINT_URL" in run("status", "-a", "some-app", code=1).stderr


def test_a_denied_action_is_named(server, shared):
    server.fault_rules.replace([FaultRule(service="dynamodb", operation="Scan", kind="deny")])
    assert "dynamodb:Scan" in run("status", "-a", shared.name).stdout


def test_a_defect_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("kcl_pipeline.cli.target.ConsumerSettings", lambda **_: 1 / 0)
    result = CliRunner().invoke(app, ["status", "-a", "some-app"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_local_serves_until_it_is_told_to_stop(tmp_path):
    command = [
        sys.executable,
        "-m",
        "kcl_pipeline.cli",
        "local",
        "--port",
        "0",
        "--create",
        "orders:3",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), process.stderr.read()
            kinesis = boto3.Session("local", "local", region_name="us-east-1").client(
                "kinesis", endpoint_url=url
            )
            assert len(kinesis.list_shards(StreamName="orders")["Shards"]) == 3
            process.terminate()
            assert process.wait(timeout=20) == 0
            assert f"export AWS_ENDPOINT_URL={url}" in process.stderr.read()
        finally:
            process.kill()


def test_local_on_a_port_that_is_taken(server):
    port = server.endpoint_url.rsplit(":", 1)[1]
    assert "choose another port, or 0" in run("local", "--port", port, code=1).stderr


@pytest.mark.parametrize("text", ["orders:0", "orders:x", ":3"])
def test_local_streams_that_cannot_be(text):
    assert (
        "neither NAME nor NAME:SHARDS" in run("local", "--port", 0, "--create", text, code=1).stderr
    )


def test_help_loads_nothing_heavy():
    program = (
        "import sys\nfrom kcl_pipeline.cli import app\n"
        "heavy = {'pyspark', 'dagster', 'boto3', 'moto', 'pyarrow', 'pandas', 'deltalake'} & "
        "set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "app(['--help'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in ("local", "status", "plan", "do", "doctor"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("encoding", "as_json"),
    [
        ("iso8859-1", False),
        *(
            pytest.param(encoding, as_json, marks=pytest.mark.long)
            for encoding, as_json in (
                ("ascii", True),
                ("utf-8", True),
                ("iso8859-1", True),
                ("utf-8", False),
                ("ascii", False),
            )
        ),
    ],
)
def test_a_terminal_that_is_not_utf_8_shows_every_name(fleet, encoding, as_json):
    owner = "wörker-→"
    boto3.client("dynamodb").update_item(
        TableName=fleet.name,
        Key={"leaseKey": {"S": fleet.keys[0]}},
        UpdateExpression="SET leaseOwner = :o, checkpointOwner = :o",
        ExpressionAttributeValues={":o": {"S": owner}},
    )
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = ["status", "-a", fleet.name, *(["--json"] if as_json else [])]
    done = subprocess.run(
        [sys.executable, "-m", "kcl_pipeline.cli", *command],
        capture_output=True,
        check=False,
        env=os.environ | plain | {"PYTHONIOENCODING": encoding},
    )
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode(encoding)
    if as_json:
        assert owner in {one["owner"] for one in json.loads(text)["leases"]}
    else:
        assert owner.encode(encoding, "backslashreplace").decode(encoding) in text


def test_session_options_overrule_the_environment(server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    options = SessionOptions(
        region_name="eu-west-1",
        endpoint_url=server.endpoint_url,
        aws_access_key_id="a",
        aws_secret_access_key="b",
    )
    clients = AwsClients(ConsumerSettings(application_name="agent-app", streams=("s",)), options)
    assert clients.endpoint_url == server.endpoint_url
    assert clients.region_name == "eu-west-1"
    assert clients.dynamodb is clients.dynamodb
    assert clients.dynamodb.list_tables()["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert clients.dynamodb.meta.config.retries["total_max_attempts"] == 1
    assert "kcl-application/agent-app" in clients.kinesis.meta.config.user_agent_extra
    assert "secret" not in repr(options)
    first = clients.kinesis
    clients.close()
    assert clients.kinesis is not first


def test_a_call_that_fails_is_sent_once(server, shared):
    server.fault_rules.replace(
        [FaultRule(service="dynamodb", operation="UpdateItem", kind="error500")]
    )
    began = time.monotonic()
    run("status", "-a", shared.name)
    with pytest.raises(Exception, match="UpdateItem"):
        shared.tables.lease.renew(shared.tables.lease.get(shared.keys[0]))
    assert server.fault_rules.rules[0].applied == 1
    assert time.monotonic() - began < 5
