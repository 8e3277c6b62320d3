"""`kcl-pipeline doctor` on `dagster.yaml`: run limits, and grace periods of run launchers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from dagster import DagsterInstance, DagsterInvalidConfigError

from kcl_pipeline.cli.doctor.dagster_instance import (
    Finding,
    check_grace,
    check_instance,
    check_run_limit,
    longest_stop_seconds,
    run_limit,
)
from kcl_pipeline.pipeline import Fleet
from tests.guides.snippets import FENCE, ROOT

STOP = 65.0


def limits(settings: str, **fleet: int) -> list[Finding]:
    return [check_run_limit(yaml.safe_load(settings) or {}, Fleet(**fleet))]


def grace(settings: str, **run_tags: object) -> list[Finding]:
    fleet = Fleet(run_tags={name: json.dumps(value) for name, value in run_tags.items()})
    return [check_grace(yaml.safe_load(settings) or {}, fleet, STOP)]


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
        "{run_queue: 2, run_launcher: K8sRunLauncher}",
        "run_launcher: {class: K8sRunLauncher, config: [1]}",
        "run_launcher: {class: K8sRunLauncher, config: {run_k8s_config: {pod_spec_config: 30}}}",
        "run_launcher: {class: DockerRunLauncher, config: {container_kwargs: 30}}",
        "run_queue: {tag_concurrency_limits: {key: kcl/mode}}",
    ],
)
def test_a_setting_of_another_type_is_as_none(settings):
    """Dagster refuses such a file with a sentence of its own."""
    assert run_limit(yaml.safe_load(settings)) == 10
    assert grace(settings)


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


K8S = "run_launcher: {module: dagster_k8s, class: K8sRunLauncher, config: {run_k8s_config: {%s}}}"
DOCKER = "run_launcher: {module: dagster_docker, class: DockerRunLauncher, config: {%s}}"
ECS = "run_launcher: {module: dagster_aws.ecs, class: EcsRunLauncher, config: {%s}}"


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (
            K8S % "",
            "30 s (the default of termination_grace_period_seconds), but a stop takes up to",
        ),
        (K8S % "pod_spec_config: {terminationGracePeriodSeconds: 60}", "60 s (termination_grace"),
        (DOCKER % "", "10 s (the default of container_kwargs.stop_timeout)"),
        (ECS % "", "30 s (the default of stopTimeout in a task definition of your own)"),
    ],
)
def test_a_grace_period_that_is_shorter_than_a_stop(settings, part):
    (found,) = grace(settings)
    assert found.level == "warning"
    assert part in found.sentence
    assert "a stop takes up to 65 s (worker.stop_timeout_millis)" in found.sentence
    assert found.advice.endswith("to 70")


def test_a_grace_period_that_is_long_enough():
    enough = K8S % "pod_spec_config: {termination_grace_period_seconds: 120}"
    assert levels(grace(enough)) == ["ok"]
    assert levels(grace(DOCKER % "container_kwargs: {stop_timeout: 90}")) == ["ok"]
    tag = {"pod_spec_config": {"termination_grace_period_seconds": 20}}
    assert levels(grace(enough, **{"dagster-k8s/config": tag})) == ["warning"]
    (found,) = grace("")
    assert (found.level, found.sentence) == (
        "ok",
        "Dagster's launcher of local processes does not kill workers",
    )


def test_what_cannot_be_read_is_unknown():
    assert levels(grace(ECS % "task_definition: 'arn:x'")) == ["unknown"]
    assert levels(grace("run_launcher: {module: m, class: OtherLauncher}")) == ["unknown"]


def test_the_files_of_the_guides_have_no_warning(tmp_path):
    for page in sorted((ROOT / "docs" / "deployment").glob("*.md")):
        for block in FENCE.finditer(page.read_text()):
            if block[1] == "yaml" and block[2].startswith("# dagster.yaml"):
                (tmp_path / "dagster.yaml").write_text(block[2])
                found = instance(tmp_path)
                assert "warning" not in levels(found), (page.name, found)


def instance(home: Path | None) -> list[Finding]:
    name = None if home is None else str(home)
    return list(check_instance(name, Fleet(min=2, max=4), STOP))


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path):
    assert levels(instance(tmp_path)) == ["ok", "ok"], "no file: Dagster's defaults"
    for text in ("a: [", "- 1"):
        (tmp_path / "dagster.yaml").write_text(text)
        (found,) = instance(tmp_path)
        assert found.level == "problem"
        assert "dagster.yaml" in found.sentence
    assert levels(instance(None)) == ["unknown"]


def test_the_time_of_a_stop_is_that_of_the_guide():
    assert longest_stop_seconds(20_000) == 27.5
