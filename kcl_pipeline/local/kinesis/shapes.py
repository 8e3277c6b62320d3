"""Request validation with the service's published model.

The checks cover required members, lengths, ranges, patterns and enumerations. Error messages have
the wording of the service.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from botocore.loaders import Loader

from kcl_pipeline.testing.kinesis.errors import KinesisError, validation

_MOST_REPORTED: Final = 10
_UNCHECKED: Final = frozenset({"PutRecordsRequestEntryList", "Data", "PartitionKey"})
"""Shapes that the Kinesis model checks itself, because it is also used without HTTP."""


@cache
def _service_model() -> Mapping[str, Any]:
    model: Mapping[str, Any] = Loader().load_service_model("kinesis", "service-2")
    return model


def check_request(operation: str, params: Mapping[str, Any]) -> None:
    """Validate the parameters of an operation; unknown operations are not checked.

    Raises:
        KinesisError: A parameter violates a constraint (ValidationException) or has a wrong type
            (SerializationException).
    """
    found = _service_model()["operations"].get(operation)
    if found is None or "input" not in found:
        return
    problems: list[str] = []
    _check(found["input"]["shape"], params, "", problems)
    if problems:
        count = f"{len(problems)} validation error{'s' if len(problems) > 1 else ''} detected: "
        raise validation(count + "; ".join(problems[:_MOST_REPORTED]))


def _lower_first(name: str) -> str:
    return name[0].lower() + name[1:]


def _expect(value: Any, kinds: type | tuple[type, ...], path: str) -> None:
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise KinesisError(
            "SerializationException",
            f"{type(value).__name__} can not be converted to the type of {path}",
        )


def _check(shape_name: str, value: Any, path: str, problems: list[str]) -> None:
    if shape_name in _UNCHECKED:
        return
    shape = _service_model()["shapes"][shape_name]
    kind = shape["type"]
    if kind == "string":
        _expect(value, str, path)
        _check_string(shape, value, path, problems)
    elif kind in {"integer", "long"}:
        _expect(value, int, path)
        _check_size(shape, value, value, path, "value", problems)
    elif kind == "boolean":
        _expect(value, bool, path)
    elif kind in {"structure", "list", "map"}:
        _check_members(shape, value, path, problems)


def _check_members(shape: Mapping[str, Any], value: Any, path: str, problems: list[str]) -> None:
    _expect(value, list if shape["type"] == "list" else Mapping, path)
    if shape["type"] == "structure":
        prefix = f"{path}." if path else ""
        missing = [_lower_first(n) for n in shape.get("required", ()) if value.get(n) is None]
        problems += [
            f"Value null at '{prefix}{n}' failed to satisfy constraint: Member must not be null"
            for n in missing
        ]
        for name, member in shape["members"].items():
            if value.get(name) is not None:
                _check(member["shape"], value[name], f"{prefix}{_lower_first(name)}", problems)
        return
    _check_size(shape, len(value), value, path, "length", problems)
    if shape["type"] == "list":
        for i, item in enumerate(value, 1):
            _check(shape["member"]["shape"], item, f"{path}.{i}.member", problems)
    else:
        for key, item in value.items():
            _check(shape["key"]["shape"], key, path, problems)
            _check(shape["value"]["shape"], item, f"{path}.{key}.member", problems)


def _check_string(shape: Mapping[str, Any], value: str, path: str, problems: list[str]) -> None:
    _check_size(shape, len(value), value, path, "length", problems)
    start = f"Value '{value}' at '{path}' failed to satisfy constraint: Member must satisfy "
    if "enum" in shape and value not in shape["enum"]:
        problems.append(f"{start}enum value set: [{', '.join(shape['enum'])}]")
    if "pattern" in shape and re.fullmatch(shape["pattern"], value) is None:
        problems.append(f"{start}regular expression pattern: {shape['pattern']}")


def _check_size(
    shape: Mapping[str, Any], size: int, value: Any, path: str, what: str, problems: list[str]
) -> None:
    start = f"Value '{value}' at '{path}' failed to satisfy constraint: Member must have {what} "
    if size < shape.get("min", size):
        problems.append(f"{start}greater than or equal to {shape['min']}")
    if size > shape.get("max", size):
        problems.append(f"{start}less than or equal to {shape['max']}")
