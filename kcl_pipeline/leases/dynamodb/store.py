"""Implement `store.RowStore` on a DynamoDB table, with boto3's low-level client.

Writes are UpdateItem, PutItem and DeleteItem with a ConditionExpression. A refused write returns
the row. The client should make one attempt per call (`aws_configs.dynamodb_config`), because a
retry would be refused because of the first attempt. The result is correct without this; see
`lease_rows`.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import TableSettings
from kcl_pipeline.errors import AwsError, NotFoundError, SettingsError, UnavailableError
from kcl_pipeline.leases.attributes import text_of
from kcl_pipeline.leases.aws_errors import ConditionFailed, TransactionRefused, call
from kcl_pipeline.leases.dynamodb.schema import TableCreator, TableShape
from kcl_pipeline.leases.paging import PageRetry
from kcl_pipeline.leases.store import (
    Absent,
    AbsentOrEquals,
    AttributeValue,
    Changes,
    Condition,
    ConditionCheck,
    Differs,
    Elsewhere,
    Equals,
    FirstEquals,
    Item,
    MapCallable,
    Outcome,
    Present,
    Put,
    Update,
    Write,
    serial_map,
)

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

_log = logging.getLogger(__name__)

MAX_SEGMENTS: Final = 32
SEGMENTS_WHEN_SIZE_IS_UNKNOWN: Final = 10
BYTES_PER_SEGMENT: Final = 200_000_000
SEGMENTS_CACHED_SECONDS: Final = 7200.0
GET_SECONDS: Final = 1.0
"""How long a throttled GetItem is repeated. The caller of a longer wait may lose its lease."""


class Expression:
    """The expressions of one request, with placeholders for all names and values.

    Placeholders avoid conflicts with DynamoDB's reserved words.
    """

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.values: dict[str, AttributeValue] = {}

    def name(self, attribute: str) -> str:
        """Return the placeholder of an attribute's name."""
        for placeholder, known in self.names.items():
            if known == attribute:
                return placeholder
        self.names[f"#n{len(self.names)}"] = attribute
        return f"#n{len(self.names) - 1}"

    def value(self, value: AttributeValue) -> str:
        """Return a new placeholder for a value."""
        self.values[f":v{len(self.values)}"] = value
        return f":v{len(self.values) - 1}"

    def condition(self, conditions: Sequence[Condition]) -> str:
        """Return the conditions joined by AND; empty for no conditions."""
        return " AND ".join(self._condition(condition) for condition in conditions)

    def _condition(self, condition: Condition) -> str:
        name = self.name(condition.attribute)
        match condition:
            case Absent():
                return f"attribute_not_exists({name})"
            case Present():
                return f"attribute_exists({name})"
            case Equals(_, value):
                return f"{name} = {self.value(value)}"
            case Differs(_, value):
                return f"(attribute_exists({name}) AND {name} <> {self.value(value)})"
            case AbsentOrEquals(_, value):
                return f"(attribute_not_exists({name}) OR {name} = {self.value(value)})"
            case FirstEquals(_, fallback, value):
                wanted = self.value(value)
                other = f"attribute_not_exists({name}) AND {self.name(fallback)} = {wanted}"
                return f"({name} = {wanted} OR ({other}))"

    def update(self, changes: Changes) -> str:
        """Return an UpdateExpression."""
        clauses = []
        if changes.put:
            clauses.append(
                "SET "
                + ", ".join(f"{self.name(a)} = {self.value(v)}" for a, v in changes.put.items())
            )
        if changes.remove:
            clauses.append("REMOVE " + ", ".join(self.name(a) for a in changes.remove))
        if changes.add:
            clauses.append(
                "ADD "
                + ", ".join(
                    f"{self.name(a)} {self.value({'N': str(n)})}" for a, n in changes.add.items()
                )
            )
        return " ".join(clauses)

    def parameters(self, **expressions: str) -> dict[str, Any]:
        """Return the parameters of the request: non-empty expressions and placeholders."""
        result: dict[str, Any] = {name: text for name, text in expressions.items() if text}
        if self.names:
            result["ExpressionAttributeNames"] = self.names
        if self.values:
            result["ExpressionAttributeValues"] = self.values
        return result


class DynamoDbStore:
    """The `RowStore` of one DynamoDB table.

    Args:
        client: The boto3 client.
        shape: Required schema of the table.
        settings: How the table is created.
        clock: The clock.
        scan_segments: Number of segments of a scan. None: by table size (protocol §1.5).
        map_segments: Scans the segments, possibly in threads.
        rng: Spreads the waits after throttled reads. None: the system's source.
    """

    def __init__(
        self,
        client: DynamoDBClient,
        shape: TableShape,
        settings: TableSettings,
        clock: Clock,
        *,
        scan_segments: int | None = None,
        map_segments: MapCallable = serial_map,
        rng: random.Random | None = None,
    ) -> None:
        self.name = shape.name
        self.key_name = shape.key_name
        self._client = client
        self._shape = shape
        self._clock = clock
        self._creator = TableCreator(client, shape, settings, clock)
        self._configured_segments = scan_segments
        self._map_segments = map_segments
        self._rng = rng or random.SystemRandom()
        self._segments: tuple[int, float] | None = None

    def ensure_exists(self) -> bool:
        """See `store.RowStore`."""
        return self._creator.ensure()

    def get(self, key: str, *, consistent: bool = True) -> Item | None:
        """See `store.RowStore`."""
        read = partial(
            self._call,
            self._client.get_item,
            "GetItem",
            Key=self._key(key),
            ConsistentRead=consistent,
        )
        return PageRetry(self._clock, self._rng, GET_SECONDS).page(read).get("Item")

    def put(self, item: Item, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`."""
        expression = Expression()
        request = expression.parameters(ConditionExpression=expression.condition(conditions))
        return self._write(
            self._client.put_item,
            "PutItem",
            item[self.key_name]["S"],
            {"Item": item, **request},
            lambda _: item,
        )

    def update(self, key: str, conditions: Sequence[Condition], changes: Changes) -> Outcome:
        """See `store.RowStore`."""
        expression = Expression()
        condition, update = expression.condition(conditions), expression.update(changes)
        request = {
            "Key": self._key(key),
            "ReturnValues": "ALL_NEW",
            **expression.parameters(ConditionExpression=condition, UpdateExpression=update),
        }
        return self._write(
            self._client.update_item,
            "UpdateItem",
            key,
            request,
            lambda response: response.get("Attributes"),
        )

    def check(self, key: str, conditions: Sequence[Condition]) -> ConditionCheck:
        """See `store.RowStore`."""
        return ConditionCheck(self, key, conditions)

    def delete(self, key: str, conditions: Sequence[Condition]) -> Outcome:
        """See `store.RowStore`."""
        expression = Expression()
        request = {
            "Key": self._key(key),
            **expression.parameters(ConditionExpression=expression.condition(conditions)),
        }
        return self._write(self._client.delete_item, "DeleteItem", key, request, lambda _: None)

    def transact(self, writes: Sequence[Write]) -> frozenset[int]:
        """See `store.RowStore`."""
        items = [self._part_of_transaction(write) for write in writes]
        checked = {
            write.store.name for write in writes if isinstance(write, ConditionCheck | Elsewhere)
        } - {self.name}
        try:
            call(
                self._client.transact_write_items,
                "TransactWriteItems",
                " and table ".join((self.name, *sorted(checked))),
                TransactItems=items,
            )
        except TransactionRefused as refused:
            return refused.indexes
        return frozenset()

    def _part_of_transaction(self, write: Write) -> dict[str, Any]:
        expression = Expression()
        condition = expression.condition(write.conditions)
        if isinstance(write, Put):
            request = expression.parameters(ConditionExpression=condition)
            return {"Put": {"TableName": self.name, "Item": write.item, **request}}
        store = self if isinstance(write, Update) else write.store
        changes = None if isinstance(write, ConditionCheck) else write.changes
        update = "" if changes is None else expression.update(changes)
        request = {
            "TableName": store.name,
            "Key": {store.key_name: {"S": write.key}},
            **expression.parameters(ConditionExpression=condition, UpdateExpression=update),
        }
        if isinstance(write, ConditionCheck):
            return {"ConditionCheck": request}
        return {"Delete" if changes is None else "Update": request}

    def scan(self, *, consistent: bool = False) -> Iterator[Item]:
        """See `store.RowStore`."""
        total = self._segment_count()
        if total == 1:
            yield from self._scan_segment({}, consistent=consistent)
            return
        segments = [{"Segment": segment, "TotalSegments": total} for segment in range(total)]
        for items in self._map_segments(
            lambda segment: list(self._scan_segment(segment, consistent=consistent)), segments
        ):
            yield from items

    def keys_by_owner(self, owner: str) -> tuple[str, ...]:
        """See `store.RowStore`. Raise `SettingsError` for a table without an index."""
        index = self._shape.index
        if index is None:
            raise SettingsError(f"the table {self.name} has no index by owner")
        expression = Expression()
        condition = expression.condition([Equals(index.hash_name, {"S": owner})])
        request = {
            "IndexName": index.name,
            **expression.parameters(KeyConditionExpression=condition),
        }
        items = self._pages(self._client.query, "Query", request)
        keys = (text_of(item, self.key_name) for item in items)
        return tuple(sorted(key for key in keys if key is not None))

    def _scan_segment(self, segment: Mapping[str, int], *, consistent: bool) -> Iterator[Item]:
        return self._pages(self._client.scan, "Scan", {"ConsistentRead": consistent, **segment})

    def _pages(
        self, method: Callable[..., Any], operation: str, request: dict[str, Any]
    ) -> Iterator[Item]:
        start: dict[str, Any] = {}
        retry = PageRetry(self._clock, self._rng)
        while True:
            response = retry.page(partial(self._call, method, operation, **request, **start))
            yield from response.get("Items", [])
            last = response.get("LastEvaluatedKey")
            if not last:
                return
            if last == start.get("ExclusiveStartKey"):
                raise UnavailableError(
                    f"{operation} on table {self.name}: a page ends at the key where it starts",
                    operation=operation,
                )
            start = {"ExclusiveStartKey": last}

    def _segment_count(self) -> int:
        if self._configured_segments is not None:
            return self._configured_segments
        now = self._clock.monotonic()
        known = self._segments
        if known is not None and now - known[1] < SEGMENTS_CACHED_SECONDS:
            return known[0]
        try:
            count = min(
                max(math.ceil(self._creator.size_bytes() / BYTES_PER_SEGMENT), 1), MAX_SEGMENTS
            )
        except NotFoundError:
            raise
        except AwsError as error:
            _log.info(
                "the size of the table %s is unknown; it is scanned in %d segments: %s",
                self.name,
                SEGMENTS_WHEN_SIZE_IS_UNKNOWN,
                error,
            )
            return SEGMENTS_WHEN_SIZE_IS_UNKNOWN
        self._segments = (count, now)
        return count

    def _write(
        self,
        method: Callable[..., Any],
        operation: str,
        key: str,
        request: dict[str, Any],
        item_after: Callable[[dict[str, Any]], Item | None],
    ) -> Outcome:
        if "ConditionExpression" in request:
            request["ReturnValuesOnConditionCheckFailure"] = "ALL_OLD"
        try:
            response = self._call(method, operation, **request)
        except ConditionFailed as refused:
            # no item: there is no row, or the endpoint does not return it
            return Outcome(applied=False, item=refused.item or self.get(key))
        return Outcome(applied=True, item=item_after(response))

    def _key(self, key: str) -> Item:
        return {self.key_name: {"S": key}}

    def _call(self, method: Callable[..., Any], operation: str, **request: Any) -> dict[str, Any]:
        return call(method, operation, self.name, TableName=self.name, **request)
