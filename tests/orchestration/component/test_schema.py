"""The schema of the attributes: complete, and described."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from kcl_pipeline import (
    CheckLimits,
    ConsumerSettings,
    DeltaSink,
    Fleet,
    ForeachArrowSink,
    ForeachBatchSink,
    KinesisPipeline,
    KinesisPipelineComponent,
    StreamConfig,
    StreamSelector,
)
from kcl_pipeline.orchestration.options import DagsterOptions
from kcl_pipeline.settings_errors import setting_names

SCHEMA = KinesisPipelineComponent.model().model_json_schema()
SETTINGS = ("application_name", "selects_streams", "streams", "stream_settings")


def objects(node: Any, name: str = "attributes") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        if "properties" in node:
            yield name, node
        for key, one in node.items():
            yield from objects(one, key)
    elif isinstance(node, list):
        for one in node:
            yield from objects(one, name)


def described(one: dict[str, Any]) -> str:
    """The description of an attribute, or of the group that it refers to."""
    group = SCHEMA["$defs"].get(one.get("$ref", "").rpartition("/")[2], {})
    return str(one.get("description") or group.get("description", ""))


def properties(name: str) -> set[str]:
    return set(SCHEMA["$defs"][name]["properties"])


def test_every_attribute_is_described():
    found = {
        f"{name}.{field}": text
        for name, one in objects(SCHEMA)
        for field, text in one["properties"].items()
    }
    assert len(found) > 150
    assert [name for name, one in found.items() if len(described(one)) < 8] == []


def test_unknown_attributes_are_refused_at_each_level():
    assert [n for n, one in objects(SCHEMA) if one.get("additionalProperties") is not False] == []


def test_the_attributes_are_the_arguments_in_python():
    arguments = {field.name for field in dataclasses.fields(KinesisPipeline)}
    assert set(SCHEMA["properties"]) == arguments | set(DagsterOptions.model_fields)


@pytest.mark.parametrize(
    "cls",
    [
        CheckLimits,
        DeltaSink,
        Fleet,
        ForeachArrowSink,
        ForeachBatchSink,
        StreamConfig,
        StreamSelector,
    ],
)
def test_a_group_has_the_fields_of_its_class(cls):
    assert properties(f"{cls.__name__}") == {f.name for f in dataclasses.fields(cls)}


def test_every_setting_is_an_attribute():
    found = SCHEMA["$defs"]["Settings"]["properties"]
    assert set(setting_names(ConsumerSettings)) - set(SETTINGS) == {
        name
        for section, one in found.items()
        for name in (
            [f"{section}.{of_it}" for of_it in properties(one["$ref"].rpartition("/")[2])]
            if "$ref" in one
            else [section]
        )
    }


def test_limits_and_choices_are_those_of_the_settings():
    lease = SCHEMA["$defs"]["LeaseSettings"]["properties"]["failover_time_millis"]
    assert lease["anyOf"] == [{"minimum": 100, "type": "integer"}, {"type": "string"}]
    assert lease["default"] == 10_000
    mode = SCHEMA["$defs"]["RetrievalSettings"]["properties"]["retrieval_mode"]
    assert mode["anyOf"][0]["enum"] == ["polling", "fan_out", "auto"]


def test_the_schema_is_standard_json():
    assert "Infinity" not in json.dumps(SCHEMA)


def test_a_secret_is_the_name_of_an_environment_variable():
    aws = SCHEMA["$defs"]["Aws"]["properties"]
    for name in ("aws_access_key_id", "aws_secret_access_key", "aws_session_token"):
        assert aws[name]["anyOf"] == [{"$ref": "#/$defs/EnvironmentVariable"}, {"type": "null"}]
    assert "max_attempts" not in aws


def test_the_descriptions_write_null_as_yaml_does():
    texts = [
        one.get("description", "") for _, o in objects(SCHEMA) for one in o["properties"].values()
    ]
    assert [text for text in texts if "None: " in text] == []
