"""Conversion of DynamoDB's legacy conditions and updates into expressions.

The Java KCL sends the legacy parameters `Expected` and `AttributeUpdates`. moto ignores `Expected`
on DeleteItem and evaluates `ConditionalOperator=OR` as AND. moto evaluates expressions correctly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

_OPERATIONS: Final = frozenset({"PutItem", "UpdateItem", "DeleteItem"})
_COMPARISONS: Final = {"EQ": "=", "NE": "<>", "LE": "<=", "LT": "<", "GE": ">=", "GT": ">"}


@dataclass(slots=True)
class _Placeholders:
    names: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def name(self, attribute: str) -> str:
        key = f"#legacy{len(self.names)}"
        self.names[key] = attribute
        return key

    def value(self, value: Any) -> str:
        key = f":legacy{len(self.values)}"
        self.values[key] = value
        return key


def modernize(operation: str, body: bytes) -> bytes:
    """Replace `Expected` and `AttributeUpdates` with expressions.

    Other requests are returned unchanged. A request that mixes both styles is also returned
    unchanged, because DynamoDB rejects it.

    Args:
        operation: The DynamoDB operation, such as `PutItem`.
        body: The JSON body of the request.

    Returns:
        The JSON body to send to moto.
    """
    if operation not in _OPERATIONS or (
        b'"Expected"' not in body and b'"AttributeUpdates"' not in body
    ):
        return body
    request = msgspec.json.decode(body)
    if "ConditionExpression" in request or "UpdateExpression" in request:
        return body
    placeholders = _Placeholders()
    expected = request.pop("Expected", None)
    joiner = f" {request.pop('ConditionalOperator', 'AND')} "
    if expected:
        request["ConditionExpression"] = joiner.join(
            f"({_condition(n, c, placeholders)})" for n, c in expected.items()
        )
    updates = request.pop("AttributeUpdates", None)
    if updates:
        request["UpdateExpression"] = _update(updates, placeholders)
    if placeholders.names:
        request["ExpressionAttributeNames"] = placeholders.names
    if placeholders.values:
        request["ExpressionAttributeValues"] = placeholders.values
    return msgspec.json.encode(request)


def _condition(attribute: str, condition: Mapping[str, Any], placeholders: _Placeholders) -> str:
    name = placeholders.name(attribute)
    operator = condition.get("ComparisonOperator")
    if operator is None:
        if condition.get("Exists") is False:
            return f"attribute_not_exists({name})"
        return f"{name} = {placeholders.value(condition['Value'])}"
    values = [
        placeholders.value(v)
        for v in condition.get(
            "AttributeValueList", [condition["Value"]] if "Value" in condition else []
        )
    ]
    if operator == "NULL":
        return f"attribute_not_exists({name})"
    if operator == "NOT_NULL":
        return f"attribute_exists({name})"
    if operator == "BETWEEN":
        return f"{name} BETWEEN {values[0]} AND {values[1]}"
    if operator == "IN":
        return f"{name} IN ({', '.join(values)})"
    if operator == "BEGINS_WITH":
        return f"begins_with({name}, {values[0]})"
    if operator in {"CONTAINS", "NOT_CONTAINS"}:
        return f"{'NOT ' if operator == 'NOT_CONTAINS' else ''}contains({name}, {values[0]})"
    return f"{name} {_COMPARISONS[operator]} {values[0]}"


def _update(updates: Mapping[str, Mapping[str, Any]], placeholders: _Placeholders) -> str:
    clauses: dict[str, list[str]] = {}
    for attribute, update in updates.items():
        name, action = placeholders.name(attribute), update.get("Action", "PUT")
        if action == "PUT":
            clauses.setdefault("SET", []).append(f"{name} = {placeholders.value(update['Value'])}")
        elif action == "DELETE" and "Value" not in update:
            clauses.setdefault("REMOVE", []).append(name)
        else:
            clauses.setdefault(action, []).append(f"{name} {placeholders.value(update['Value'])}")
    return " ".join(f"{keyword} {', '.join(parts)}" for keyword, parts in clauses.items())
