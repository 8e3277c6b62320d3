"""`dagster dev` in a checkout: from the page to the first rows, in a browser."""

from __future__ import annotations

import os
import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import requests

from kcl_pipeline.local.demo.processes import Processes, free_port
from tests.support.browser import MISSING, browser
from tests.support.fleet_processes import CLOCK, wait_until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"there is no {' and no '.join(MISSING)}"),
]
ROOT = Path(__file__).parents[2]
PROJECT = ("assets", "resources", "sensors")
FILES = ("definitions.py", "workspace.yaml", "dagster.yaml", "pyproject.toml")
EVENTS = """query($key: AssetKeyInput!) { assetOrError(assetKey: $key) { ... on Asset {
  assetMaterializations(limit: 10) { metadataEntries { label ... on IntMetadataEntry {
  intValue } } } } } }"""


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def test_a_fresh_checkout_shows_rows_and_the_table_that_follows(tmp_path, monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith(("AWS_", "DAGSTER_"))]:
        monkeypatch.delenv(name)
    for name in PROJECT:
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))  # without the Spark half, for a quick start
    port = free_port(0)
    url = f"http://127.0.0.1:{port}"
    processes = Processes(tmp_path, CLOCK)

    def rows() -> int:
        asked = {"query": EVENTS, "variables": {"key": {"path": ["orders", "orders"]}}}
        found = requests.post(f"{url}/graphql", json=asked, timeout=30).json()["data"]
        found = found["assetOrError"]
        return sum(
            entry.get("intValue") or 0
            for one in found.get("assetMaterializations", ())
            for entry in one["metadataEntries"]
            if entry["label"] == "rows"
        )

    try:
        arguments = ["-m", "dagster", "dev", "-h", "127.0.0.1", "-p", str(port)]
        processes.start("dagster", arguments)
        wait_until(lambda: answers(url), 300, "the page")
        began = CLOCK.monotonic()
        wait_until(lambda: rows() > 0, 300, "the first materialization with rows")
        seconds = CLOCK.monotonic() - began
        with capsys.disabled():
            sys.stdout.write(f"\n{seconds:.1f} s from the page to the first rows\n")
        assert processes.log_text("dagster").count("an embedded AWS runs at") == 1
        with browser(tmp_path) as looker:
            looker.open(f"{url}/assets/orders/orders?view=overview")
            looker.wait_for("Latest materialization", "records_per_second", seconds=120)
            looker.open(f"{url}/assets/telemetry/needs_java?view=overview")
            looker.wait_for("there is no Java", seconds=120)
            looker.open(f"{url}/assets/orders/revenue_per_minute?view=overview")
            looker.wait_for("rows_read", seconds=300)
    finally:
        processes.stop_all()
    wait_until(lambda: not _servers(tmp_path), 60, "the embedded AWS to end")


def _servers(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if "kcl_pipeline.local.shared" in words and str(folder / ".run") in words:
            found.append(process.info["pid"])
    return found
