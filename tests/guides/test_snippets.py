"""Every Python and shell snippet of the README and the guides runs, page by page."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import boto3
import pytest
import yaml

from kcl_pipeline import EmbeddedAws
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.planning import strategies
from tests.guides.snippets import (
    ROOT,
    RUN_LANGUAGES,
    commands,
    missing_packages,
    pages,
    run_command,
    run_python,
    snippets,
)

WITH_SNIPPETS = [
    page for page in pages() if any(one.language in RUN_LANGUAGES for one in snippets(page))
]
SYNTAX_ONLY = {("docs/querying.md", "a jar"), ("docs/pipes.md", "dagster_k8s")}
LANGUAGES = {"python", "shell", "json", "yaml", "", "{eval-rst}", "{toctree}"}
EXAMPLE = "my_orders"
LOOKS = {
    "docs/dead-letters.md",
    "docs/downstream.md",
    "docs/operations-again.md",
    "docs/operations-repair.md",
    "docs/operations-stop.md",
    "docs/operations.md",
    "docs/querying.md",
}
"""Pages that look at what the example has written."""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with the README's example, and its stream with records on the embedded AWS."""
    (example,) = (one.code for one in snippets("README.md") if one.file == f"{EXAMPLE}.py")
    (tmp_path / f"{EXAMPLE}.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    strategies.names()  # loads the package's own
    monkeypatch.setattr(strategies, "_REGISTRY", dict(strategies._REGISTRY))
    known, environment = set(sys.modules), dict(os.environ)
    with EmbeddedAws() as aws:
        os.environ |= aws.environment()
        kinesis = boto3.client("kinesis")
        kinesis.create_stream(StreamName="orders", ShardCount=2)
        records = []
        for number in range(20):
            order = {"id": f"o-{number}", "user": "ann", "amount": 1.5}
            order["time"] = "2026-01-02T03:04:05Z"
            data = b"not json" if number == 7 else json.dumps(order).encode()
            records.append({"PartitionKey": str(number), "Data": data})
        assert not kinesis.put_records(StreamName="orders", Records=records)["FailedRecordCount"]
        yield tmp_path
    for name in set(sys.modules) - known:
        if name.startswith("my_"):
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)


def fill_table() -> None:
    """Run the example, so that its tables exist."""
    orders = sys.modules[EXAMPLE].orders
    worker = orders.build_worker("before", clock=SystemClock())
    assert worker.run(SystemClock().signal(), mode="drain").reason == "drained"


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.PreviewWarning")
@pytest.mark.parametrize("page", WITH_SNIPPETS)
def test_the_snippets_of_the_page_run(page, project, spark, capsys):
    names: dict[str, Any] = {"spark": spark, "__name__": "snippets"}
    exec(f"import {EXAMPLE}\nfrom {EXAMPLE} import parse, orders", names)
    if page in LOOKS:
        fill_table()
    skipped = set()
    for one in snippets(page):
        source = f"{page}:{one.line}"
        if one.language == "json":
            json.loads(one.code)
        elif one.language == "yaml":
            assert yaml.safe_load(one.code)
        elif one.language == "shell":
            for words in commands(one.code):
                run_command(words, project)
        elif one.language == "python":
            if one.file:
                (project / one.file).write_text(one.code)
            missing = missing_packages(one.code)
            if missing:
                compile(one.code, source, "exec")
                skipped |= {(page, package) for package in missing}
            else:
                run_python("\n" * (one.line - 1) + one.code, source, names)
    assert skipped == {entry for entry in SYNTAX_ONLY if entry[0] == page}


def test_pages_use_known_languages():
    used = {(page, one.language) for page in pages() for one in snippets(page)}
    assert {language for _, language in used} <= LANGUAGES


def test_a_page_says_which_snippets_do_not_run():
    for page, _ in SYNTAX_ONLY:
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert "check the syntax of" in text
