"""Fixtures of the command line's tests, as a pytest plugin that their modules name."""

import pytest

from kcl_pipeline.local import EmbeddedAws
from tests.support.cli_fleet import build_fleet

ACCOUNT_VARIABLES = (
    "AWS_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL_DYNAMODB",
    "AWS_ENDPOINT_URL_KINESIS",
    "AWS_CA_BUNDLE",
)


@pytest.fixture(scope="module")
def server():
    """One embedded AWS per module."""
    with EmbeddedAws() as aws:
        aws.warm_up()
        yield aws


@pytest.fixture(scope="module")
def java_home(tmp_path_factory):
    """A Java that only says its version, quickly."""
    home = tmp_path_factory.mktemp("java")
    (home / "bin").mkdir()
    command = home / "bin" / "java"
    command.write_text("#!/bin/sh\necho 'openjdk version \"17.0.15\" 2025-04-15' >&2\n")
    command.chmod(0o755)
    return home


@pytest.fixture
def environment(server, java_home, monkeypatch):
    """The standard variables point to the embedded AWS; no fault outlives a test."""
    monkeypatch.setenv("JAVA_HOME", str(java_home))
    for name in ACCOUNT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    yield
    server.fault_rules.replace([])


@pytest.fixture
def fleet(server):
    """An application with four shards, two workers and a leader, for one test."""
    return build_fleet(server)


@pytest.fixture(scope="module")
def shared(server):
    """The same for all tests that only look."""
    return build_fleet(server)
