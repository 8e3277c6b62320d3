"""DynamoDB's older conditions and updates (`Expected`, `AttributeUpdates`), which the Java KCL
sends, rewritten as the expressions that moto gets right.

As they are, moto ignores `Expected` on DeleteItem and reads `ConditionalOperator=OR` as AND.
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
    """The request with expressions in place of `Expected` and `AttributeUpdates`; any other request
    as it is.

    Requests that mix both styles are left for DynamoDB to refuse.
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
