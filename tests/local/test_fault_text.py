"""Faults on the command line: their text, delays, and both commands."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from botocore.exceptions import ClientError

from kcl_pipeline.cli.local import local, serve
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.local.__main__ import main
from kcl_pipeline.local.fault_text import parse_fault
from kcl_pipeline.local.faults import Fault, FaultRule, FaultRules
from tests.support.local_aws import client


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (
            "dynamodb.Scan:throttle=0.5",
            FaultRule(service="dynamodb", operation="Scan", kind="throttle", probability=0.5),
        ),
        ("kinesis:deny", FaultRule(service="kinesis", kind="deny")),
        ("kinesis.*:error500=1", FaultRule(service="kinesis", kind="error500")),
        ("*:drop_after=0.01", FaultRule(kind="drop_after", probability=0.01)),
        ("*.GetItem:drop_before", FaultRule(operation="GetItem", kind="drop_before")),
        (
            "s3.PUT:delay=0.2",
            FaultRule(service="s3", operation="PUT", kind="delay", delay_seconds=0.2),
        ),
    ],
)
def test_a_rule_as_text(text: str, rule: FaultRule) -> None:
    assert parse_fault(text) == rule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "throttle",
        ":throttle",
        "dynamodb.Scan",
        "dynamodb.Scan:slow",
        "dynamodb.Scan:throttle=2",
        "dynamodb.Scan:throttle=half",
        "dynamodb.Scan:throttle=",
        "kinesis:delay",
        "kinesis:delay=-1",
    ],
)
def test_other_text_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(SettingsError, match=r"write for example dynamodb\.Scan:throttle=0\.5"):
        parse_fault(text)


def test_delays_are_added_to_the_fault_of_another_rule() -> None:
    rules = FaultRules()
    rules.replace([parse_fault(text) for text in ("*:delay=1", "s3:delay=2", "s3.PUT:throttle")])
    assert rules("kinesis", "PutRecord", b"") == Fault("delay", delay_seconds=1)
    assert rules("s3", "PUT", b"") == Fault("throttle", delay_seconds=3)


def test_a_delayed_call_is_answered_later() -> None:
    with EmbeddedAws() as aws:
        kinesis = client(aws.endpoint_url, "kinesis")
        kinesis.list_streams()
        aws.fault_rules.replace([parse_fault("kinesis.ListStreams:delay=0.3")])
        began = time.monotonic()
        assert kinesis.list_streams()["StreamNames"] == []
        assert time.monotonic() - began >= 0.3


def test_the_command_begins_its_faults_after_it_has_created_the_streams(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stop = SystemClock().signal()
    stop.set()
    with EmbeddedAws() as aws:
        serve(aws, [("orders", 1)], stop, [parse_fault("kinesis:throttle")])
        assert capsys.readouterr().out.startswith("http://127.0.0.1:")
        with pytest.raises(ClientError, match="LimitExceededException"):
            client(aws.endpoint_url, "kinesis").list_streams()
        assert list(aws.kinesis.world.streams) == ["orders"]


@pytest.mark.parametrize("arguments", [["--fault", "kinesis:slow"]])
def test_both_commands_refuse_a_rule_that_is_none(
    arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--port", "0", *arguments]) == 1
    assert "--fault 'kinesis:slow' is not SERVICE.OPERATION:KIND=VALUE" in capsys.readouterr().err
    with pytest.raises(SettingsError, match="--fault 'kinesis:slow'"):
        local(port=0, fault=list(arguments[1:]))
