"""Each import rule of `.importlinter` finds a violation of it."""

from __future__ import annotations

import configparser
from copy import deepcopy
from pathlib import Path

import pytest
from importlinter.application import use_cases
from importlinter.configuration import configure

ROOT = Path(__file__).parents[2]
VIOLATIONS = {
    "layers": ("kcl_pipeline.leases.row", "kcl_pipeline.kinesis.client"),
    "cycles": ("kcl_pipeline.delta.files", "kcl_pipeline.delta.sink"),
    "dagster": ("kcl_pipeline.worker.worker", "dagster"),
    "dagster_order": (
        "kcl_pipeline.orchestration.resources",
        "kcl_pipeline.orchestration.names",
    ),
    "pyspark": ("kcl_pipeline.delta.sink", "pyspark"),
    "local": ("kcl_pipeline.worker.worker", "kcl_pipeline.testing.clock"),
    "testing": ("kcl_pipeline.testing.clock", "pytest"),
    "leader": ("kcl_pipeline.leader.cycle", "kcl_pipeline.delta.sink"),
    "delta": ("kcl_pipeline.delta.sink", "kcl_pipeline.leases.row"),
    "spark": ("kcl_pipeline.spark.writer", "kcl_pipeline.leases.row"),
    "spark_worker": ("kcl_pipeline.spark.data_source.feed", "kcl_pipeline.worker.worker"),
    "input": ("kcl_pipeline.kinesis.reader", "kcl_pipeline.leases.row"),
    "planning": ("kcl_pipeline.planning.state", "kcl_pipeline.clock"),
    "metrics": ("kcl_pipeline.leases.writes", "kcl_pipeline.metrics.exporters"),
    "layout": ("kcl_pipeline.worker.worker", "kcl_pipeline.leases.dynamodb"),
    "values": ("kcl_pipeline.events", "socket"),
}


@pytest.fixture(scope="module")
def options():
    configure()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        found = use_cases.read_user_options(str(ROOT / ".importlinter"))
        use_cases._register_contract_types(found)
        yield found


@pytest.fixture(scope="module")
def graph(options):
    return use_cases._build_graph(
        root_package_names=options.session_options["root_packages"],
        include_external_packages=True,
        exclude_type_checking_imports=False,
        cache_dir=None,
        verbose=False,
    )


def fails(graph, options, rule):
    report = use_cases._build_report(
        graph=graph,
        graph_building_duration=0,
        user_options=options,
        limit_to_contracts=(rule,),
        show_timings=False,
        verbose=False,
    )
    return report.contains_failures


def test_every_rule_has_a_violation():
    written = configparser.ConfigParser()
    written.read(ROOT / ".importlinter")
    rules = {name.rpartition(":")[2] for name in written.sections() if "contract" in name}
    assert rules == set(VIOLATIONS)


@pytest.mark.parametrize("rule", VIOLATIONS)
def test_a_violation_of_the_rule_is_found(graph, options, rule):
    importer, imported = VIOLATIONS[rule]
    assert importer in graph.modules
    changed = deepcopy(graph)
    if imported not in changed.modules:
        changed.add_module(imported, is_squashed=True)
    assert not fails(changed, options, rule)
    changed.add_import(importer=importer, imported=imported)
    assert fails(changed, options, rule)
