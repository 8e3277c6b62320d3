"""The command line: what people type, and what it prints of rows that others wrote."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
from random import Random
from typing import Any, Final
from unittest import mock

from typer.testing import CliRunner, Result

from kcl_pipeline import events as ev
from kcl_pipeline.cli import app, show
from kcl_pipeline.cli.target import Target
from kcl_pipeline.leases.layout import Layout, Tables
from kcl_pipeline.leases.row import BadRow
from kcl_pipeline.metrics.exporters import text_of
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
)
from tests.fuzz import values
from tests.fuzz.boundaries.rows import LEASE, LOCK, MIGRATION, WORKER, row_like
from tests.fuzz.boundary import Boundary

SHOWN: Final = "shown"
FAILED: Final = "one sentence"
USAGE: Final = "usage"
COMMANDS: Final = ("status", "plan", "doctor", "do")
OPTIONS: Final = (
    "--application",
    "-a",
    "--stream",
    "-s",
    "--pipeline",
    "--by",
    "--json",
    "--observe-seconds",
    "--watch-seconds",
    "--help",
    "--nothing",
)
ENVIRONMENT: Final = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
    "AWS_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_EC2_METADATA_DISABLED": "true",
    "COLUMNS": "120",
}


def require_harmless(text: str) -> None:
    """Nothing in the text moves a cursor or reorders it, and there is no traceback."""
    bad = {c for c in text if c != "\n" and not c.isprintable()}
    assert not bad, f"{bad} in {text[:500]!r}"
    assert "Traceback" not in text


def _texts(random: Random) -> list[str]:
    return [values.text(random)[:3_000] for _ in range(random.randrange(1, 5))]


def check_output(texts: list[str]) -> str:
    """Any strings in a table, a line, JSON and a log line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        show.print_table(texts[0], texts, [texts], numbers=texts[:1])
        show.echo(texts[0])
        show.print_bad_rows([BadRow(text, text, text) for text in texts])
        before = len(out.getvalue())
        show.print_json({"texts": texts, texts[0]: None})
    said = out.getvalue()
    require_harmless(said)
    require_harmless(err.getvalue())
    assert json.loads(said[before:]) == {"texts": texts, texts[0]: None}
    for event in (
        ev.RowRejected(texts[0], texts[-1], texts[0]),
        ev.LeasesCreated(texts[0], tuple(texts), texts[-1]),
        ev.LeaseMoved(texts[0], None, texts[-1], graceful=True, reason=texts[0]),
    ):
        line = text_of(event)
        assert line.isprintable()
        assert len(line) < 50_000
    return SHOWN


def _arguments(random: Random) -> list[str]:
    found = [random.choice(COMMANDS)] if random.random() < 0.9 else []
    for _ in range(random.randrange(5)):
        found.append(random.choice(OPTIONS))
        if random.random() < 0.8:
            made = random.choice((values.text, values.number_text))(random)
            found.append(made[:500].replace("\0", ""))
    return found


def _outcome(result: Result) -> str:
    require_harmless(result.output)
    require_harmless(result.stderr)
    error = result.exception
    assert error is None or isinstance(error, SystemExit), repr(error)
    assert result.exit_code in {0, 1, 2}
    return (SHOWN, FAILED, USAGE)[result.exit_code]


def check_input(arguments: list[str]) -> str:
    """Any arguments: a result, one sentence, or the usage. There is no AWS to be reached."""
    with mock.patch.dict(os.environ, ENVIRONMENT):
        result = CliRunner().invoke(app, arguments)
    return _outcome(result)


def _rows(random: Random) -> dict[str, Any]:
    return {
        "command": random.choice(("status", "plan")),
        "options": random.choice(([], ["--json"], ["--by", "worker"])),
        "leases": [row_like(LEASE)(random) for _ in range(random.randrange(1, 4))],
        "workers": [row_like(WORKER)(random) for _ in range(random.randrange(3))],
        "lock": row_like(LOCK)(random),
        "migration": row_like(MIGRATION)(random),
    }


@functools.cache
def _kinesis() -> InMemoryKinesis:
    model = KinesisModel(VirtualClock())
    model.create_stream("orders", 2)
    return InMemoryKinesis(model)


def check_rows(value: dict[str, Any]) -> str:
    """Any rows in the tables: each command shows the others, or says one sentence."""
    leases, workers = InMemoryLeaseTable(), InMemoryWorkerMetricsTable()
    coordinator = InMemoryCoordinatorStateTable()
    for number, item in enumerate(value["leases"]):
        leases.plant({"leaseKey": {"S": f"shardId-{number}"}, **item})
    for number, item in enumerate(value["workers"]):
        workers.plant({"wid": {"S": f"w{number}"}, **item})
    coordinator.plant({**value["lock"], "key": {"S": "Leader"}})
    coordinator.plant({**value["migration"], "key": {"S": "Migration3.0"}})
    layout = Layout(leases.store, workers.store, coordinator.store, clock=VirtualClock())
    tables = Tables(leases, workers, coordinator, layout)
    options = value["options"]
    options = [] if options[:1] == ["--by"] and value["command"] != "status" else options
    arguments = [value["command"], "-a", "orders", "-s", "orders", *options]
    with (
        mock.patch.object(Target, "tables", tables),
        mock.patch.object(Target, "kinesis", _kinesis()),
    ):
        result = CliRunner().invoke(app, arguments)
    if "--json" in options and result.exit_code == 0:
        json.loads(result.stdout)
    return _outcome(result)


BOUNDARIES: Final = (
    Boundary("cli_output", _texts, check_output, frozenset({SHOWN}), short_inputs=100),
    Boundary(
        "cli_input", _arguments, check_input, frozenset({SHOWN, FAILED, USAGE}), short_inputs=50
    ),
    Boundary("cli_rows", _rows, check_rows, frozenset({SHOWN}), short_inputs=20),
)
