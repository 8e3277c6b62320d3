"""What is missing is named, and no credential comes out."""

from __future__ import annotations

import ast
import contextlib

import pytest

from kcl_pipeline.errors import AccessDeniedError
from kcl_pipeline.local import EmbeddedAws
from tests.support.cli_fleet import run
from tests.support.iam_world import (  # noqa: F401 (fixtures)
    ROOT,
    SECRETS,
    WORKERS,
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


@pytest.mark.parametrize("lacking", denied("leader"))
def test_what_a_leader_lacks_is_named(
    gate: Gate, application: Application, lacking: Permission
) -> None:
    rare = application.rare()
    gate.allowed = permissions("leader") - {lacking}
    try:
        report = application.lead()
        if lacking in rare:
            rare[lacking]()
        text = f"{report.error}\n{application.said()}"
    except AccessDeniedError as error:
        text = str(error)
    if lacking == ("dynamodb:DescribeTable", ""):
        assert "None" in text, "only the size of a table is asked, and it is not needed"
    else:
        assert is_named(lacking, application, text)
        assert "Traceback" not in text


@pytest.mark.parametrize("lacking", denied("worker"))
def test_what_a_worker_lacks_is_named(
    gate: Gate, application: Application, lacking: Permission
) -> None:
    if lacking in BY_LATER_WORKERS:
        application.drain()
        application.split()
    if lacking == ("dynamodb:UpdateTable", ""):
        application.create_lease_table_without_index()
    rare = application.rare() if lacking == ("dynamodb:GetItem", WORKERS) else {}
    gate.allowed = permissions("worker") - {lacking}
    try:
        if lacking in rare:
            rare[lacking]()
        if lacking == LATE:
            application.work_until(lambda: is_named(lacking, application, application.said()))
        else:
            application.drain(*names_of(lacking, application))
        text = application.said()
    except AccessDeniedError as error:
        text = str(error)
    assert is_named(lacking, application, text)


LATE = ("dynamodb:DeleteItem", "")
"""A leader cycle after the children began. A drain may end before it."""

BY_LATER_WORKERS = {("dynamodb:GetItem", ""), LATE}
"""The first worker of an application does not ask for these."""


def names_of(lacking: Permission, application: Application) -> tuple[str, str]:
    action, place = lacking
    table = application.name + place.partition("/")[0]
    return action, application.name if place == "stream" else f"table {table}"


def is_named(lacking: Permission, application: Application, text: str) -> bool:
    return any(
        all(part in line for part in names_of(lacking, application)) for line in text.splitlines()
    )


def test_what_a_reader_lacks_is_one_sentence(
    gate: Gate, application: Application, monkeypatch: pytest.MonkeyPatch, aws: EmbeddedAws
) -> None:
    application.pipeline.ensure_tables(clients=application.clients)
    for name, value in aws.environment().items():
        monkeypatch.setenv(name, value)
    gate.allowed = permissions("reader") - {("dynamodb:Scan", "")}
    said = run("status", "-a", application.name).stdout
    (line,) = [line for line in said.splitlines() if "no_permission: the leases" in line]
    assert "(the action is dynamodb:Scan)" in line


def test_no_credential_comes_out(
    gate: Gate,
    application: Application,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Not in events, logs, output, rows, the table or the text of any object, also when calls are
    denied.
    """
    caplog.set_level("INFO")
    application.drain()
    gate.allowed = set()
    with pytest.raises(AccessDeniedError) as denied:
        application.drain()
    with contextlib.suppress(AccessDeniedError):
        application.lead()
    gate.allowed = None
    rows = [
        application.clients.dynamodb.scan(TableName=f"{application.name}{suffix}")["Items"]
        for suffix in ("", "-WorkerMetricStats", "-CoordinatorState")
    ]
    files = [
        path.read_bytes().decode("latin-1")
        for path in application.table.rglob("*")
        if path.is_file()
    ]
    out = capfd.readouterr()
    texts = [
        str(application.events),
        caplog.text,
        out.out,
        out.err,
        str(rows),
        str(denied.value),
        repr(application.pipeline),
        *files,
    ]
    assert len(application.events) > 5
    assert files
    for secret in SECRETS[1:]:
        assert all(secret not in text for text in [*texts, repr(application.clients.options)])
    assert all(SECRETS[0] not in text for text in texts)


def test_nothing_that_is_read_is_run() -> None:
    """No pickle, eval, exec, marshal or unsafe YAML in the package: rows and records are data."""
    modules, calls = (
        {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"},
        {"eval", "exec", "compile", "__import__"},
    )
    seen = 0
    for path in (ROOT / "kcl_pipeline").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            seen += 1
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not {name.split(".")[0] for name in names} & modules, path
            if isinstance(node, ast.Call):
                assert not (isinstance(node.func, ast.Name) and node.func.id in calls), path
                unsafe = isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in {
                    "yaml.load",
                    "yaml.unsafe_load",
                    "yaml.full_load",
                }
                assert not unsafe, path
    assert seen > 50_000
