"""A serializer for moto's answers of DynamoDB.

The attribute values that moto returns are in the wire format. moto still looks for each of their
ten members under several names, which takes most of the time of a call that returns items.

Only `MotoServices` imports this module, because moto is slow to import.
"""

from __future__ import annotations

from typing import Any, Final

from moto.core.serialize import SERVICE_SPECIFIC_SERIALIZERS, JSONSerializer

_PLAIN: Final = {"S": str, "N": str, "BOOL": bool, "NULL": bool, "SS": list, "NS": list}


class ItemSerializer(JSONSerializer):  # type: ignore[misc]  # moto has no types
    """Writes strings, numbers, their sets, booleans and nulls as they are; moto writes the rest."""

    def _serialize_type_structure(self, serialized: Any, value: Any, shape: Any, key: str) -> None:
        if key and shape.name == "AttributeValue" and isinstance(value, dict) and len(value) == 1:
            [(kind, content)] = value.items()
            if type(content) is _PLAIN.get(kind):
                self._default_serialize(serialized, value, shape, key)
                return
        super()._serialize_type_structure(serialized, value, shape, key)


def install() -> None:
    """Let moto use the serializer for DynamoDB."""
    SERVICE_SPECIFIC_SERIALIZERS["dynamodb"] = {"json": ItemSerializer}
