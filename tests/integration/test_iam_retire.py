"""The policy `retire` of docs/iam.md: enough, nothing unused, and what is missing is named."""

from __future__ import annotations

import pytest

from kcl_pipeline.control import retire
from kcl_pipeline.errors import AccessDeniedError
from tests.integration.test_iam_missing import is_named
from tests.integration.test_retire_anew import retiring
from tests.support.iam_world import (  # noqa: F401 (fixtures)
    Application,
    Gate,
    Permission,
    _open_again,
    application_fixture,
    aws_fixture,
    denied,
    gate_fixture,
    permissions,
)

ALL = permissions("retire")


def stopped(application: Application) -> None:
    application.pipeline.ensure_tables(clients=application.clients)
    application.drain()
    arn = application.kinesis.describe_stream_summary(StreamName=application.name)[
        "StreamDescriptionSummary"
    ]["StreamARN"]
    application.kinesis.register_stream_consumer(StreamARN=arn, ConsumerName=application.name)


def test_a_retirement_has_what_it_needs_and_uses_all_of_it(
    gate: Gate, application: Application
) -> None:
    stopped(application)
    gate.used.clear()
    gate.allowed = ALL
    assert retiring(application).retire(application.name).is_complete
    assert gate.used == ALL


@pytest.mark.parametrize("lacking", denied("retire"))
def test_what_a_retirement_lacks_is_named(
    gate: Gate, application: Application, lacking: Permission
) -> None:
    stopped(application)
    gate.allowed = ALL - {lacking}
    try:
        done = retiring(application).retire(application.name)
        assert not done.is_complete
        text = "\n".join(retire.sentences(done))
    except AccessDeniedError as error:
        text = str(error)
    assert is_named(lacking, application, text)
    gate.allowed = None
    assert retiring(application).retire(application.name).is_complete
