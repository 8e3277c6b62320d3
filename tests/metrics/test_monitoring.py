"""The dashboard and the alert rules use only series that the endpoint serves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import promql_parser
import pytest
import yaml

from kcl_pipeline.metrics import monitoring
from kcl_pipeline.metrics.exporters.prometheus import PrometheusExporter
from kcl_pipeline.metrics.instruments import INSTRUMENTS, Level, prometheus_name
from tests.metrics.test_prometheus import scraped
from tests.support.metrics_world import FedExporter

_VARIABLE = re.compile(r"\$__rate_interval")
LABEL_VALUES = re.compile(r"label_values\((.*), (\w+)\)")
DASHBOARD = json.loads(monitoring.read("kcl_dashboard.json"))
RULES = yaml.safe_load(monitoring.read("kcl_alerts.yml"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def emitted():
    """Sample names that the endpoint serves after one event of each type, with their labels."""
    fed = FedExporter(lambda s, e: PrometheusExporter("orders", "w1", s, e), prometheus_port=0)
    try:
        fed.feed_samples()
        found, _ = scraped(fed.exporter)
    finally:
        fed.feed.close()
    labels: dict[str, set[str]] = {}
    for samples in found.values():
        for name, given, _ in samples:
            labels.setdefault(name, set()).update(given)
    return labels


def walk(node):
    """Yield all nodes of an expression."""
    yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "vs"):
        child = getattr(node, name, None)
        if child is not None:
            yield from walk(child)
    for child in getattr(node, "args", None) or ():
        yield from walk(child)


def series_of(node):
    """Return {series: labels of its matchers} of an expression."""
    found: dict[str, set[str]] = {}
    for one in walk(node):
        if isinstance(one, promql_parser.VectorSelector):
            names = found.setdefault(one.name, set())
            names |= {matcher.name for matcher in one.matchers.matchers}
    return found


def check(expression, emitted):
    """Check the names and labels of a query against the series of the endpoint."""
    tree = promql_parser.parse(_VARIABLE.sub("5m", expression))
    found = series_of(tree)
    assert found, expression
    for series, labels in found.items():
        assert series in emitted, (series, expression)
        assert labels <= emitted[series], (labels - emitted[series], expression)
    for one in walk(tree):
        if isinstance(one, promql_parser.AggregateExpr) and one.modifier is not None:
            served = set.intersection(*(emitted[series] for series in series_of(one)))
            assert set(one.modifier.labels) <= served, (one.modifier.labels, expression)
    return found


@pytest.mark.parametrize("expression", QUERIES)
def test_a_panel_uses_only_series_and_labels_that_are_served(expression, emitted):
    check(expression, emitted)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_uses_only_series_and_labels_that_are_served_at_level_summary(rule, emitted):
    found = check(rule["expr"], emitted)
    summary = {prometheus_name(one) for one in INSTRUMENTS if one.level is Level.SUMMARY}
    histograms = {f"{name}_{part}" for name in summary for part in ("bucket", "sum", "count")}
    assert found.keys() <= summary | histograms
    assert all("shard" not in labels for labels in found.values())
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"].keys() == {"summary", "description"}
    shown = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    kept = re.search(r"by \(([\w, ]+)\)", rule["expr"])
    assert kept is not None
    assert shown <= set(kept[1].split(", "))


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum(aws_kinesis_client_no_such_total)", "no_such"),
        ('max(aws_kinesis_client_workers{shard="a"})', "shard"),
        ("sum by (shard) (rate(aws_kinesis_client_time_milliseconds_count[5m]))", "shard"),
        ("sum(rate(aws_kinesis_client_success_total[5m] offset 1h)) by (le)", "le"),
        ("1 - max(aws_kinesis_client_workerz)", "workerz"),
    ],
)
def test_the_check_finds_what_is_not_served(expression, problem, emitted):
    with pytest.raises(AssertionError, match=problem):
        check(expression, emitted)


def test_the_variables_of_the_dashboard_use_a_series_of_every_worker(emitted):
    variables = [one for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    assert [one["name"] for one in variables] == ["application", "worker"]
    for one in variables:
        found = LABEL_VALUES.fullmatch(one["definition"])
        assert found is not None
        check(found[1], emitted)
        assert found[2] in emitted["aws_kinesis_client_current_leases"]
        assert one["query"]["query"] == one["definition"]


def test_the_dashboard_has_no_panel_on_another():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    places = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        for column in range(place["x"], place["x"] + place["w"]):
            for row in range(place["y"], place["y"] + place["h"]):
                assert (column, row) not in places, panel["title"]
                places.add((column, row))
    assert max(column for column, _ in places) < 24


def test_the_page_names_every_alert():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    documented = re.findall(r"^\| `(Kcl\w+)` \|", page, re.MULTILINE)
    assert documented == [rule["alert"] for rule in ALERTS]


def test_the_command_copies_both_files(tmp_path):
    command = [sys.executable, "-m", "kcl_pipeline.metrics.monitoring"]
    folder = tmp_path / "new" / "folder"
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(folder / name) for name in monitoring.FILES]
    for name in monitoring.FILES:
        assert (folder / name).read_text() == monitoring.read(name)
    wrong = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr.startswith("usage: ")) == (2, True)
