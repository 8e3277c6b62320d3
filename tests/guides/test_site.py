"""The site of the documents builds without a warning, and its generated pages are current."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kcl_pipeline
import kcl_pipeline.testing
from kcl_pipeline.config import ConsumerSettings
from tools import configuration_page, metrics_page

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"^\.\. auto\w+:: (\w+)$", re.MULTILINE)


# `make test` has the links and anchors (docs/test_citations), the table of contents and the names
@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-n", "--keep-going", "-c", "docs"]
    command += ["-d", str(tmp_path / "doctrees"), ".", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "docs" / "index.html").exists()
    api = (tmp_path / "site" / "docs" / "api.html").read_text()
    missing = [name for name in kcl_pipeline.__all__ if f'id="kcl_pipeline.{name}"' not in api]
    assert missing == ["__version__"]


def test_the_api_page_has_each_public_name_once():
    named = NAMED.findall((ROOT / "docs" / "api.md").read_text())
    public = {*kcl_pipeline.__all__, *kcl_pipeline.testing.__all__} - {"__version__"}
    assert sorted(named) == sorted(public)


def test_every_page_is_in_the_table_of_contents():
    index = (ROOT / "docs" / "index.md").read_text()
    docs = ROOT / "docs"
    found = [*docs.glob("*.md"), *(docs / "deployment").glob("*.md")]
    pages = {path.relative_to(docs).with_suffix("").as_posix() for path in found} - {"index"}
    assert {page for page in pages if not re.search(rf"^{page}$", index, re.MULTILINE)} == set()


def test_the_configuration_page_is_current():
    page = configuration_page.PAGE.read_text(encoding="utf-8")
    assert page == configuration_page.page(), (
        "the settings changed: run python -m tools.configuration_page"
    )
    assert configuration_page.unknown_names() == set()


def test_the_tables_of_the_metrics_page_are_current():
    text = metrics_page.PAGE.read_text(encoding="utf-8")
    assert text == metrics_page.page(text), "the registry changed: run python -m tools.metrics_page"


def test_the_configuration_page_has_each_setting():
    page = configuration_page.page()
    names = {path.rpartition(".")[2] for path in configuration_page.all_settings()}
    assert {name for name in names if f"| `{name}` |" not in page} == set()
    assert len(names) > len(ConsumerSettings.model_fields)
