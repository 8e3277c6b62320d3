"""The files of the deployment guides are valid, and their figures are those of the code."""

from __future__ import annotations

import configparser
import importlib
import json
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.validate import ParamValidator
from dagster._config import process_config, resolve_to_config_type
from dagster._core.instance.config import dagster_instance_config, dagster_instance_config_schema

from kcl_pipeline import ConsumerSettings
from kcl_pipeline.orchestration.names import APPLICATION_TAG, CONTINUOUS, MODE_TAG
from kcl_pipeline.orchestration.runs import silence_limit_seconds
from kcl_pipeline.worker.processing import STEP_SECONDS
from kcl_pipeline.worker.stopping.leaving import LEAVE_SECONDS
from kcl_pipeline.worker.worker import STOP_SECONDS
from tests.guides.snippets import FENCE, ROOT, commands

GUIDES = sorted((ROOT / "docs" / "deployment").glob("*.md"))
OVERVIEW = " ".join((ROOT / "docs" / "deployment.md").read_text().split())
INSTALLED = {"dagster_aws.ecs"}
FIELDS = {
    "dagster_k8s": {
        "service_account_name",
        "job_namespace",
        "instance_config_map",
        "dagster_home",
        "run_k8s_config",
    },
    "dagster_docker": {"image", "network", "env_vars", "container_kwargs"},
}
"""Fields of launchers that are not installed here, of dagster-k8s and dagster-docker 0.29.27."""


def blocks(*languages: str) -> list[Any]:
    """The blocks of the guides in these languages, with the name of their page."""
    return [
        pytest.param(block[2], id=f"{page.stem}-{number}")
        for page in GUIDES
        for number, block in enumerate(FENCE.finditer(page.read_text()))
        if block[1] in languages
    ]


def kind(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ")


def is_worker_command(words: list[str]) -> bool:
    return words[:4] == ["kcl-pipeline", "worker", "--pipeline", "my_orders:orders"]


def test_every_block_has_a_language_that_is_checked():
    used = {b[1] for page in GUIDES for b in FENCE.finditer(page.read_text())}
    assert used == {"yaml", "json", "ini", "python"}
    kinds = {kind(param.values[0]) for param in blocks("yaml")}
    assert kinds == {"dagster.yaml", "compose.yaml", "Kubernetes manifest", "deployment settings"}


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_is_valid(text, tmp_path):
    content = yaml.safe_load(text)
    if kind(text) == "dagster.yaml":
        check_instance(text, tmp_path)
    elif kind(text) == "deployment settings":
        check_schema(content)
    elif kind(text) == "compose.yaml":
        (worker,) = content["services"].values()
        assert is_worker_command(worker["command"])
        assert worker["stop_grace_period"] == "120s"
    else:
        check_manifest(content)


def check_schema(content: dict[str, Any]) -> None:
    schema = resolve_to_config_type(dagster_instance_config_schema())
    result = process_config(schema, content)
    assert result.success, result.errors


def check_instance(text: str, folder: Path) -> None:
    """Dagster reads the file, and the launcher accepts its settings."""
    (folder / "dagster.yaml").write_text(text)
    content, _ = dagster_instance_config(str(folder))
    check_schema(dict(content))
    for limit in content.get("run_queue", {}).get("tag_concurrency_limits", []):
        assert limit["key"] in (MODE_TAG, APPLICATION_TAG)
        assert limit["key"] != MODE_TAG or limit["value"] == CONTINUOUS
    assert content["run_monitoring"]["cancel_timeout_seconds"] > 120
    launcher = content.get("run_launcher")
    if launcher is None:
        return
    if launcher["module"] in INSTALLED:
        found = getattr(importlib.import_module(launcher["module"]), launcher["class"])
        result = process_config(resolve_to_config_type(found.config_type()), launcher["config"])
        assert result.success, result.errors
    else:
        assert set(launcher["config"]) <= FIELDS[launcher["module"]]


def check_manifest(content: dict[str, Any]) -> None:
    assert (content["apiVersion"], content["kind"]) == ("apps/v1", "StatefulSet")
    template = content["spec"]["template"]
    assert content["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    assert template["spec"]["terminationGracePeriodSeconds"] == 120
    (container,) = template["spec"]["containers"]
    assert is_worker_command(container["command"])
    assert container["image"]
    names = {one["name"] for one in container["env"]}
    assert "POD_NAME" in names
    assert "$(POD_NAME)" in container["command"]


@pytest.mark.parametrize("text", blocks("json"))
def test_the_task_definition_is_valid(text):
    model = boto3.client("ecs", region_name="eu-central-1").meta.service_model
    shape = model.operation_model("RegisterTaskDefinition").input_shape
    report = ParamValidator().validate(json.loads(text), shape)
    assert not report.has_errors(), report.generate_report()


@pytest.mark.parametrize("text", blocks("ini"))
def test_the_unit_runs_a_worker(text):
    unit = configparser.ConfigParser(interpolation=None)
    unit.read_string(text)
    (words,) = commands(unit["Service"]["ExecStart"])
    assert is_worker_command([Path(words[0]).name, *words[1:]])
    assert unit["Service"]["KillMode"] == "mixed"
    assert unit["Service"]["TimeoutStopSec"] == "120"


@pytest.mark.parametrize("text", blocks("python"))
def test_python_runs(text):
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(text, "guide", "exec"), names)
    orders = names["orders"]
    if "DAGSTER_CLOUD_DEPLOYMENT_NAME" in text:
        assert orders.name == "orders-local"
    else:
        config = json.loads(orders.workers.run_tags["dagster-k8s/config"])
        assert config["container_config"]["resources"]["limits"] == {"memory": "4Gi"}


def test_the_times_of_a_stop_are_those_of_the_code():
    settings = ConsumerSettings(application_name="orders", streams=["orders"])
    assert f"`worker.stop_timeout_millis` ({settings.worker.stop_timeout_millis // 1000} s)" in (
        OVERVIEW
    )
    assert f"at most {STEP_SECONDS} s |" in OVERVIEW
    assert f"to this worker ({LEAVE_SECONDS:.0f} s)" in OVERVIEW
    assert f"at most {STOP_SECONDS} s, with" in OVERVIEW
    assert STEP_SECONDS + STOP_SECONDS <= 10
    assert settings.worker.stop_timeout_millis / 1000 + STOP_SECONDS < 30
    assert f"not reported for {silence_limit_seconds(settings):.0f} seconds" in OVERVIEW
