"""The version of a pipeline: the same for the same code and settings, and without secrets."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.orchestration.assets import pipeline_version as module
from kcl_pipeline.orchestration.assets.pipeline_version import pipeline_version
from kcl_pipeline.pipeline import Fleet, KinesisPipeline
from kcl_pipeline.stream_config import StreamSelector

PROGRAM = """
from kcl_pipeline.orchestration.assets.pipeline_version import pipeline_version
from shop.orders import pipeline
print(pipeline_version(pipeline))
"""
ORDERS = """
from kcl_pipeline import DeltaSink, KinesisPipeline
from shop.rows import wanted
def transform(records):
    return wanted(records)
pipeline = KinesisPipeline("orders", ["a", "b"], DeltaSink("/lake/orders", table_properties={
    "x": "1", "y": "2"}), transform_arrow=transform)
"""


def pipeline(**changes) -> KinesisPipeline:
    given = {"name": "orders", "streams": ["orders"], "sink": DeltaSink("/lake/orders")}
    return KinesisPipeline(**given | changes)


@pytest.fixture(name="package")
def package_fixture(tmp_path, monkeypatch):
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "orders.py").write_text(ORDERS)
    (folder / "rows.py").write_text("def wanted(records): return records\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]


def in_another_process(folder, seed: str) -> str:
    path = os.pathsep.join([str(folder.parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.check_output(command, env=environment, text=True).strip()


def test_it_is_the_same_in_every_process_and_changes_with_a_file_of_the_package(package):
    first = in_another_process(package, "1")
    assert len(first) == 12
    assert in_another_process(package, "2") == first
    assert pipeline_version(importlib.import_module("shop.orders").pipeline) == first
    (package / "rows.py").write_text("def wanted(records): return records[:1]\n")
    assert in_another_process(package, "1") != first


def test_the_code_version_of_the_user_replaces_the_files(package):
    found = importlib.import_module("shop.orders").pipeline
    named = replace(found, workers=Fleet(code_version="4f2c"))
    version = pipeline_version(named)
    (package / "rows.py").write_text("def wanted(records): return records[:1]\n")
    assert pipeline_version(named) == version
    assert pipeline_version(replace(found, workers=Fleet(code_version="5a11"))) != version


@pytest.mark.parametrize(
    "changes",
    [
        {"settings_overrides": {"lease": {"failover_time_millis": 5000}}},
        {"sink": DeltaSink("/lake/orders", schema_evolution=True)},
        {"spark_config": {"spark.executor.memory": "4g"}},
        {"workers": Fleet(run_tags={"ecs/cpu": "512"})},
        {"workers": Fleet(code_version="4f2c")},
        {"transform_arrow": lambda records: records},
        {"transform": functools.partial(lambda extra, records: records, 1)},
        {"streams": ["orders", "clicks"]},
        {"streams": StreamSelector(prefix="orders-")},
        {"streams": lambda: ["orders"]},
    ],
)
def test_it_changes_with_the_configuration(changes):
    assert pipeline_version(pipeline(**changes)) != pipeline_version(pipeline())
    assert pipeline_version(pipeline(**changes)) == pipeline_version(pipeline(**changes))


def test_the_number_of_workers_does_not_count():
    other = pipeline(workers=Fleet(3, 9, max_starting=1, rolling_replacement=False))
    assert pipeline_version(other) == pipeline_version(pipeline())


def test_it_has_no_secrets(monkeypatch):
    texts = []
    dumps = json.dumps
    monkeypatch.setattr(module.json, "dumps", lambda *a, **k: texts.append(dumps(*a, **k)) or "")
    options = {"AWS_SECRET_ACCESS_KEY": "hidden-1", "region": "eu-west-1"}
    pipeline_version(
        pipeline(
            sink=DeltaSink("s3://lake/orders", storage_options=options),
            spark_config={"spark.hadoop.fs.s3a.secret.key": "hidden-3", "spark.a": "shown"},
        )
    )
    (text,) = texts
    assert "hidden" not in text
    assert "shown" in text
    assert "eu-west-1" in text


class Callable:
    def __call__(self, records):
        return records


@pytest.mark.parametrize("function", [Callable(), functools.partial(Callable()), sorted])
def test_functions_of_any_kind_are_described(function):
    version = pipeline_version(pipeline(transform_arrow=function))
    assert version == pipeline_version(pipeline(transform_arrow=function))
    assert version != pipeline_version(pipeline())
