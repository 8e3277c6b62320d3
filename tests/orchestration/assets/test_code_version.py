"""The version of the code: the option, else the commit or image of the code location, else none."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import pytest

from kcl_pipeline.orchestration.specs import VARIABLES, code_version, git_commit
from tests.support.dagster_fakes import FakeFleet, FakePipeline


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def git(folder, *arguments):
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A project in Git with a function of a user."""
    (tmp_path / "shop_orders.py").write_text("def parse(records):\n    return records\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("shop_orders", None)
    git_commit.cache_clear()


def test_the_option_comes_first(monkeypatch):
    monkeypatch.setenv("DAGSTER_CURRENT_IMAGE", "shop/orders:17")
    assert code_version(FakePipeline(workers=FakeFleet(code_version="7c1"))) == "7c1"


def test_the_image_of_the_code_location(monkeypatch):
    monkeypatch.setenv("DAGSTER_CURRENT_IMAGE", "registry.example.com/" + "a" * 60 + "/orders:17")
    assert code_version(FakePipeline()) == "a" * 30 + "/orders:17"
    monkeypatch.setenv("DAGSTER_CLOUD_GIT_SHA", "a3a4ca8686")
    assert code_version(FakePipeline()) == "a3a4ca8686"


def test_the_commit_of_the_folder_of_the_function(shop):
    pipeline = FakePipeline(transform=importlib.import_module("shop_orders").parse)
    first = code_version(pipeline)
    assert len(first) == 12
    (shop / "readme").write_text("x")
    git_commit.cache_clear()
    assert code_version(pipeline) == first, "changes that are not committed do not count"
    git(shop, "add", ".")
    git(shop, "commit", "-q", "-m", "second")
    git_commit.cache_clear()
    assert code_version(pipeline) not in (None, first)


def test_without_a_commit_the_version_is_not_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    git_commit.cache_clear()
    assert code_version(FakePipeline()) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    git_commit.cache_clear()
    assert code_version(FakePipeline()) is None, "Git is not installed"


def test_the_class_of_a_console_has_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    git_commit.cache_clear()
    kind = type("Parse", (), {"__module__": "__main__", "__call__": lambda self, records: records})
    assert code_version(FakePipeline(transform=kind())) is None
