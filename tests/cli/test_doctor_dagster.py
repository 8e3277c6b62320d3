"""`kcl-pipeline doctor` on `dagster.yaml`: run limits."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from dagster import DagsterInstance, DagsterInvalidConfigError

from kcl_pipeline.cli.doctor.dagster_instance import (
    Finding,
    check_instance,
    check_run_limit,
    run_limit,
)
from kcl_pipeline.pipeline import Fleet
from tests.guides.snippets import FENCE, ROOT


def limits(settings: str, **fleet: int) -> list[Finding]:
    return [check_run_limit(yaml.safe_load(settings) or {}, Fleet(**fleet))]


def levels(found: list[Finding]) -> list[str]:
    return [one.level.value for one in found]


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ("", 10),
        ("concurrency: {runs: {max_concurrent_runs: 2}}", 2),
        ("run_queue: {max_concurrent_runs: 25}", 25),
        ("run_queue: {max_concurrent_runs: -1}", None),
        ("run_coordinator: {class: DefaultRunCoordinator}", None),
        ("run_coordinator: {class: QueuedRunCoordinator, config: {max_concurrent_runs: 7}}", 7),
        ("run_queue: {max_concurrent_runs: {env: NOT_SET_ANYWHERE}}", 10),
        ("run_coordinator: QueuedRunCoordinator", 10),
        ("{run_coordinator: {config: 7}, concurrency: {runs: 3}, run_queue: [4]}", 10),
    ],
)
def test_the_run_limit_is_read_as_dagster_reads_it(settings, limit):
    assert run_limit(yaml.safe_load(settings) or {}) == limit


@pytest.mark.parametrize(
    "settings",
    [
        "run_queue: 2",
        "run_queue: {tag_concurrency_limits: {key: kcl/mode}}",
    ],
)
def test_a_setting_of_another_type_is_as_none(settings):
    """Dagster refuses such a file with a sentence of its own."""
    assert run_limit(yaml.safe_load(settings)) == 10


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (2, 4), (5, 4)])
def test_a_run_limit_without_a_place_for_other_runs(limit, most):
    (found,) = limits(f"concurrency: {{runs: {{max_concurrent_runs: {limit}}}}}", min=1, max=most)
    assert found.level == "warning"
    assert found.sentence.startswith(
        f"max_concurrent_runs is {limit}, and Fleet.max is {most}: workers may take all places"
    )
    assert f"max_concurrent_runs: {most + 2} or more" in found.advice
    enough = f"concurrency: {{runs: {{max_concurrent_runs: {most + 2}}}}}"
    assert levels(limits(enough, min=1, max=most)) == ["ok"]


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ("", "concurrency.runs.max_concurrent_runs"),
        ("concurrency: {runs: {max_concurrent_runs: 2}}", "concurrency.runs.max_concurrent_runs"),
        ("concurrency: {pools: {default_limit: 1}}", "concurrency.runs.max_concurrent_runs"),
        ("run_queue: {max_concurrent_runs: 2}", "run_queue.max_concurrent_runs"),
        (
            "run_queue: {tag_concurrency_limits: [{key: team, limit: 30}]}",
            "run_queue.max_concurrent_runs",
        ),
        (
            "run_coordinator: {class: QueuedRunCoordinator, config: {max_concurrent_runs: 2}}",
            "run_coordinator.config.max_concurrent_runs",
        ),
    ],
)
def test_the_advice_names_the_section_that_the_file_has(settings, setting):
    """Dagster refuses a file with limits in two sections, so another one must not be added."""
    (found,) = limits(settings, max=20)
    assert found.advice.startswith(f"write {setting}: 22 or more into dagster.yaml")


def test_dagster_refuses_limits_in_two_sections(tmp_path):
    both = "run_queue: {max_concurrent_runs: 2}\nconcurrency: {runs: {max_concurrent_runs: 6}}\n"
    (tmp_path / "dagster.yaml").write_text(both)
    with pytest.raises(DagsterInvalidConfigError, match="incompatible"):
        DagsterInstance.from_config(str(tmp_path))


def test_the_files_of_the_guides_have_no_warning(tmp_path):
    for page in sorted((ROOT / "docs" / "deployment").glob("*.md")):
        for block in FENCE.finditer(page.read_text()):
            if block[1] == "yaml" and block[2].startswith("# dagster.yaml"):
                (tmp_path / "dagster.yaml").write_text(block[2])
                found = instance(tmp_path)
                assert "warning" not in levels(found), (page.name, found)


def instance(home: Path | None) -> list[Finding]:
    name = None if home is None else str(home)
    return [check_instance(name, Fleet(min=2, max=4))]


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path):
    assert levels(instance(tmp_path)) == ["ok"], "no file: Dagster's defaults"
    for text in ("a: [", "- 1"):
        (tmp_path / "dagster.yaml").write_text(text)
        (found,) = instance(tmp_path)
        assert found.level == "problem"
        assert "dagster.yaml" in found.sentence
    assert levels(instance(None)) == ["unknown"]
