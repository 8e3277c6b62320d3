"""The tables of an application in DynamoDB: errors, creation, rows, and deletion."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from botocore.exceptions import ClientError

from kcl_pipeline.aws_calls import aws_errors
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings, LeaseSettings, TableSettings
from kcl_pipeline.errors import (
    AwsError,
    IncompatibleTableError,
    InvalidRequestError,
    NotFoundError,
    SettingsError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.leases.deletion import Presence, TableFound
from kcl_pipeline.leases.layout import Layout, Tables, TableUse, open_rows
from kcl_pipeline.leases.row import (
    CHECKPOINT,
    COORDINATOR_KEYS,
    COUNTER,
    ENTITY_TYPE,
    LEASE_KEY,
    MIGRATION_KEY,
    OWNER,
    is_lease,
    text_of,
)
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
    Outcome,
    Present,
    Put,
    Update,
    Write,
)
from kcl_pipeline.leases.workers import LAST_UPDATE, STATS, is_worker
from kcl_pipeline.threads import MapCallable, serial_map

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


CONDITION_FAILED: Final = "ConditionalCheckFailedException"
TRANSACTION_CANCELED: Final = "TransactionCanceledException"
IN_USE: Final = "ResourceInUseException"

_REFUSED: Final = "ConditionalCheckFailed"
_TRANSIENT: Final = frozenset(
    {"TransactionConflict", "ProvisionedThroughputExceeded", "ThrottlingError"}
)
"""Transient reasons of a canceled transaction."""


class ConditionFailed(AwsError):  # noqa: N818 (an outcome, not an error of the caller)
    """A conditional write was refused.

    Attributes:
        item: The row that the service found. None: there is no row, or it was not returned.
    """

    def __init__(self, message: str, *, operation: str, item: Item | None) -> None:
        super().__init__(message, code=CONDITION_FAILED, operation=operation)
        self.item = item


class TransactionRefused(AwsError):  # noqa: N818 (an outcome, not an error of the caller)
    """A transaction was refused, and nothing was applied.

    Attributes:
        indexes: Indexes of the writes whose conditions do not hold.
    """

    def __init__(self, message: str, *, operation: str, indexes: frozenset[int]) -> None:
        super().__init__(message, code=TRANSACTION_CANCELED, operation=operation)
        self.indexes = indexes


def call(method: Callable[..., Any], operation: str, table: str, **request: Any) -> dict[str, Any]:
    """Call a method of the client on a table.

    Raises:
        ConditionFailed: A conditional write was refused.
        TransactionRefused: A transaction was refused because of its conditions.
        AwsError: The call failed.
    """
    with aws_errors("dynamodb", operation, f"table {table}", refused_condition):
        response: dict[str, Any] = method(**request)
        return response


def refused_condition(error: ClientError, code: str, text: str) -> AwsError | None:
    """Return the error of a refused conditional write or transaction; None for other codes."""
    operation = error.operation_name
    if code == CONDITION_FAILED:
        item: Any = dict(error.response).get("Item")
        found = item if isinstance(item, dict) else None
        return ConditionFailed(text, operation=operation, item=found)
    return _canceled(error, operation, text) if code == TRANSACTION_CANCELED else None


def _canceled(error: ClientError, operation: str, text: str) -> AwsError:
    # The reasons are in the order of the writes.
    reasons: Any = dict(error.response).get("CancellationReasons")
    codes = [
        str(reason.get("Code", "")) if isinstance(reason, dict) else ""
        for reason in (reasons if isinstance(reasons, list) else [])
    ]
    if _TRANSIENT.intersection(codes):
        return ThrottledError(text, code=TRANSACTION_CANCELED, operation=operation)
    indexes = frozenset(index for index, code in enumerate(codes) if code == _REFUSED)
    if indexes:
        return TransactionRefused(text, operation=operation, indexes=indexes)
    return InvalidRequestError(text, code=TRANSACTION_CANCELED, operation=operation)


ATTEMPTS: Final = 16
"""With half of all requests throttled, a page fails finally once in 65,536 reads."""

FIRST_WAIT_SECONDS: Final = 0.05
LONGEST_WAIT_SECONDS: Final = 1.0
TOTAL_SECONDS: Final = 15.0
"""Limit for the pages of one read. Half of the duration of the leader lock."""

_T = TypeVar("_T")


class PageRetry:
    """Retries the pages of one scan or query. A page that was read is not read again.

    Args:
        clock: Clock of the waits.
        rng: Spreads the waits of processes that were throttled together.
        total_seconds: Limit for all pages together.
    """

    def __init__(
        self, clock: Clock, rng: random.Random, total_seconds: float = TOTAL_SECONDS
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._deadline = clock.monotonic() + total_seconds

    def page(self, read: Callable[[], _T]) -> _T:
        """Return the result of `read`, which is repeated while it is throttled.

        Raises:
            ThrottledError: All attempts were throttled, or the time of this read is over.
            AwsError: `read` failed.
        """
        wait = FIRST_WAIT_SECONDS
        attempts = 0
        while True:
            try:
                return read()
            except ThrottledError:
                attempts += 1
                seconds = wait * self._rng.uniform(0.5, 1.0)
                if attempts == ATTEMPTS or self._clock.monotonic() + seconds > self._deadline:
                    raise
            self._clock.sleep(seconds)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)


TABLE_WAIT_SECONDS: Final = 600.0
INDEX_WAIT_SECONDS: Final = 3600.0
FIRST_POLL_SECONDS: Final = 0.5
LONGEST_POLL_SECONDS: Final = 10.0

_INDEX_CHANGES_REFUSED: Final = frozenset({IN_USE, "ValidationException"})
_RECOVERY_NOT_READY: Final = "ContinuousBackupsUnavailableException"


@dataclass(frozen=True, slots=True)
class Index:
    """A keys-only global index with hash key `hash_name` and the table's key as range key."""

    name: str
    hash_name: str


@dataclass(frozen=True, slots=True)
class TableShape:
    """The required schema of a table.

    Attributes:
        name: Name of the table.
        key_name: Name of its string primary key.
        index: Index that is added after the table exists. None: no index.
    """

    name: str
    key_name: str
    index: Index | None = None


T = TypeVar("T")


class TableCreator:
    """Creates one table. All waits use the clock and are limited."""

    def __init__(
        self, client: DynamoDBClient, shape: TableShape, settings: TableSettings, clock: Clock
    ) -> None:
        self._client = client
        self._shape = shape
        self._settings = settings
        self._clock = clock

    def ensure(self) -> bool:
        """Create the table and its index if they are missing.

        Returns:
            Whether this call created the table.

        Raises:
            IncompatibleTableError: The existing table has another key.
            UnavailableError: The table or the index did not become usable in time.
        """
        found = self._describe()
        created = found is None and self._create()
        table = _usable(found) or self._await(
            "creation", TABLE_WAIT_SECONDS, lambda: _usable(self._describe())
        )
        if not created:
            self._check_key(table)
        if self._settings.point_in_time_recovery_enabled:
            self._await("point-in-time recovery", TABLE_WAIT_SECONDS, self._enable_recovery)
        index = self._shape.index
        if index is not None and _index_status(table, index) != "ACTIVE":
            self._await(
                f"index {index.name}", INDEX_WAIT_SECONDS, lambda: self._index_usable(index)
            )
        return created

    def size_bytes(self) -> int:
        """Return the size of the table, which DynamoDB updates about every six hours.

        Raises:
            AwsError: The call failed.
        """
        return int(self._described().get("TableSizeBytes") or 0)

    def _describe(self) -> dict[str, Any] | None:
        try:
            return self._described()
        except NotFoundError:
            return None

    def _described(self) -> dict[str, Any]:
        table: dict[str, Any] = call(
            self._client.describe_table,
            "DescribeTable",
            self._shape.name,
            TableName=self._shape.name,
        )["Table"]
        return table

    def _create(self) -> bool:
        settings, shape = self._settings, self._shape
        request: dict[str, Any] = {
            "TableName": shape.name,
            "KeySchema": [{"AttributeName": shape.key_name, "KeyType": "HASH"}],
            "AttributeDefinitions": [{"AttributeName": shape.key_name, "AttributeType": "S"}],
            "BillingMode": settings.billing_mode,
            **self._throughput(),
        }
        if shape.index is not None:
            # Java adds the index to the finished table, which takes minutes; with the table it is
            # there at once. The table is the same afterwards.
            request["AttributeDefinitions"] += [
                {"AttributeName": shape.index.hash_name, "AttributeType": "S"}
            ]
            request["GlobalSecondaryIndexes"] = [{**self._index(shape.index), **self._throughput()}]
        if settings.deletion_protection_enabled:
            request["DeletionProtectionEnabled"] = True
        if settings.tags:
            request["Tags"] = [
                {"Key": key, "Value": value} for key, value in sorted(settings.tags.items())
            ]
        try:
            call(self._client.create_table, "CreateTable", shape.name, **request)
        except InvalidRequestError as error:
            if error.code == IN_USE:  # another worker was first
                return False
            raise
        return True

    def _throughput(self) -> dict[str, Any]:
        if self._settings.billing_mode != "PROVISIONED":
            return {}
        return {
            "ProvisionedThroughput": {
                "ReadCapacityUnits": self._settings.read_capacity_units,
                "WriteCapacityUnits": self._settings.write_capacity_units,
            }
        }

    def _check_key(self, table: Mapping[str, Any]) -> None:
        types = {
            a["AttributeName"]: a["AttributeType"] for a in table.get("AttributeDefinitions", [])
        }
        keys = [
            (k["AttributeName"], k["KeyType"], types.get(k["AttributeName"]))
            for k in table["KeySchema"]
        ]
        if keys != [(self._shape.key_name, "HASH", "S")]:
            found = ", ".join(f"{name} ({kind} {type_})" for name, kind, type_ in keys)
            raise IncompatibleTableError(
                f"the table {self._shape.name} has the key {found}, but this application "
                f"needs {self._shape.key_name} (HASH S): it belongs to another program; "
                "set another table_name"
            )

    def _enable_recovery(self) -> bool:
        try:
            call(
                self._client.update_continuous_backups,
                "UpdateContinuousBackups",
                self._shape.name,
                TableName=self._shape.name,
                PointInTimeRecoverySpecification={"PointInTimeRecoveryEnabled": True},
            )
        except InvalidRequestError as error:
            if error.code == _RECOVERY_NOT_READY:
                return False
            raise
        return True

    def _index_usable(self, index: Index) -> bool:
        table = self._described()
        status = _index_status(table, index)
        if status is None and table["TableStatus"] == "ACTIVE":
            self._add_index(index, table)
        return status == "ACTIVE"

    def _index(self, index: Index) -> dict[str, Any]:
        return {
            "IndexName": index.name,
            "KeySchema": [
                {"AttributeName": index.hash_name, "KeyType": "HASH"},
                {"AttributeName": self._shape.key_name, "KeyType": "RANGE"},
            ],
            "Projection": {"ProjectionType": "KEYS_ONLY"},
        }

    def _add_index(self, index: Index, table: dict[str, Any]) -> None:
        create = self._index(index)
        base = table.get("ProvisionedThroughput", {})
        if table.get("BillingModeSummary", {}).get(
            "BillingMode", "PROVISIONED"
        ) == "PROVISIONED" and base.get("ReadCapacityUnits"):
            create["ProvisionedThroughput"] = {
                name: base[name] for name in ("ReadCapacityUnits", "WriteCapacityUnits")
            }
        try:
            call(
                self._client.update_table,
                "UpdateTable",
                self._shape.name,
                TableName=self._shape.name,
                AttributeDefinitions=[
                    {"AttributeName": name, "AttributeType": "S"}
                    for name in (self._shape.key_name, index.hash_name)
                ],
                GlobalSecondaryIndexUpdates=[{"Create": create}],
            )
        except InvalidRequestError as error:
            # another worker may have added it, which the next poll shows; other errors are raised
            if error.code not in _INDEX_CHANGES_REFUSED or (
                error.code != IN_USE and "exist" not in str(error)
            ):
                raise

    def _await(self, what: str, seconds: float, ready: Callable[[], T | None]) -> T:
        deadline = self._clock.monotonic() + seconds
        pause = FIRST_POLL_SECONDS
        last_error: Exception | None = None
        while True:
            try:
                if result := ready():
                    return result
                last_error = None
            except (ThrottledError, UnavailableError) as error:
                last_error = error
            if self._clock.monotonic() + pause > deadline:
                raise UnavailableError(
                    f"{what} of the table {self._shape.name} was not ready after {seconds:g} s",
                    operation="DescribeTable",
                ) from last_error
            self._clock.sleep(pause)
            pause = min(pause * 2, LONGEST_POLL_SECONDS)


def _usable(table: dict[str, Any] | None) -> dict[str, Any] | None:
    return table if table is not None and table["TableStatus"] in {"ACTIVE", "UPDATING"} else None


def _index_status(table: Mapping[str, Any], index: Index) -> str | None:
    found = (
        one for one in table.get("GlobalSecondaryIndexes", []) if one["IndexName"] == index.name
    )
    return next((str(one.get("IndexStatus", "ACTIVE")) for one in found), None)


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
        """See `store.LeaseStore`."""
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


OWNER_INDEX: Final = Index("LeaseOwnerToLeaseKeyIndex", OWNER)


def lease_store(
    client: DynamoDBClient,
    name: str,
    settings: TableSettings,
    lease_settings: LeaseSettings,
    clock: Clock,
    map_segments: MapCallable = serial_map,
) -> DynamoDbStore:
    """Return the rows of a lease table.

    Args:
        client: Should make one attempt per call (`kcl_pipeline.aws.configs.dynamodb_config`).
        name: Name of the table.
        settings: How the table is created.
        lease_settings: Number of scan segments.
        clock: The clock.
        map_segments: Scans the segments, possibly in threads.
    """
    shape = TableShape(name, LEASE_KEY, OWNER_INDEX)
    segments = lease_settings.lease_table_scan_total_segments
    return DynamoDbStore(
        client, shape, settings, clock, scan_segments=segments, map_segments=map_segments
    )


def open_dynamodb(
    client: DynamoDBClient,
    settings: ConsumerSettings,
    clock: Clock,
    map_segments: MapCallable = serial_map,
) -> Tables:
    """Return the rows of an application. This reads no table.

    Args:
        client: Should make one attempt per call (`kcl_pipeline.aws.configs.dynamodb_config`).
        settings: All settings.
        clock: The clock.
        map_segments: Scans the segments of the lease table, possibly in threads.
    """

    def store(name: str, key_name: str, table: TableSettings) -> DynamoDbStore:
        return DynamoDbStore(client, TableShape(name, key_name), table, clock, scan_segments=1)

    leases = lease_store(
        client,
        settings.lease_table_name,
        settings.lease_table,
        settings.lease,
        clock,
        map_segments,
    )
    layout = Layout(
        leases,
        store(settings.worker_metrics_table_name, "wid", settings.worker_metrics_table),
        store(settings.coordinator_state_table_name, "key", settings.coordinator_state_table),
        configured=settings.table_layout,
        clock=clock,
    )
    return open_rows(layout, clock)


STREAM_ENTITY: Final = "STREAM"
_NO_ROWS: Final = frozenset({"CREATING", "DELETING"})


def is_own(use: TableUse, item: Item) -> bool:
    """Return whether a row, readable or not, belongs to the application that uses the table."""
    key = text_of(item, "key") or text_of(item, LEASE_KEY)
    return (
        (use.has_leases and is_lease(item) and (CHECKPOINT in item or COUNTER in item))
        or (use.has_workers and is_worker(item) and (LAST_UPDATE in item or STATS in item))
        or (
            use.has_state
            and (key in COORDINATOR_KEYS or text_of(item, ENTITY_TYPE) == STREAM_ENTITY)
        )
    )


class DynamoDbDeletion:
    """Deletes one table, or the application's rows in it (see `TableDeletion`).

    Args:
        client: Should make one attempt per call.
        shape: Name and key of the table.
        is_own: Whether a row belongs to the application.
        clock: The clock of the scan's waits.
    """

    def __init__(
        self,
        client: DynamoDBClient,
        shape: TableShape,
        is_own: Callable[[Item], bool],
        clock: Clock,
    ) -> None:
        self.name = shape.name
        self._client = client
        self._shape = shape
        self._is_own = is_own
        self._store = DynamoDbStore(client, shape, TableSettings(), clock, scan_segments=1)

    def find(self) -> TableFound | None:
        """See `TableDeletion`. Scans the table."""
        table = self._describe()
        if table is None:
            return None
        self._check_key(table)
        own, foreign = self._rows(table)
        created = table.get("CreationDateTime")
        return TableFound(
            self.name,
            _id_of(table),
            len(own),
            foreign,
            None if created is None else created.timestamp(),
            bool(table.get("DeletionProtectionEnabled")),
        )

    def presence(self, target: TableFound) -> Presence:
        """See `TableDeletion`."""
        table = self._describe()
        if table is None or _id_of(table) != target.table_id:
            return Presence.GONE
        if table["TableStatus"] == "DELETING":
            return Presence.LEAVING
        if target.is_shared and not self._rows(table)[0]:
            return Presence.GONE
        return Presence.THERE

    def delete(self, target: TableFound) -> None:
        """See `TableDeletion`."""
        if target.is_shared:
            table = self._describe()
            for key in self._rows(table)[0] if table is not None else ():
                self._store.delete(key, [])
            return
        _request_deletion(self._client, self.name)

    def _describe(self) -> dict[str, Any] | None:
        try:
            table: dict[str, Any] = call(
                self._client.describe_table, "DescribeTable", self.name, TableName=self.name
            )["Table"]
        except NotFoundError:
            return None
        return table

    def _check_key(self, table: dict[str, Any]) -> None:
        keys = [one["AttributeName"] for one in table["KeySchema"]]
        if keys != [self._shape.key_name]:
            raise IncompatibleTableError(
                f"the table {self.name} has the key {', '.join(keys)} instead of "
                f"{self._shape.key_name}: it belongs to another program and is not deleted"
            )

    def _rows(self, table: dict[str, Any]) -> tuple[list[str], int]:
        """Return the keys of the application's rows, and the number of other rows."""
        if table["TableStatus"] in _NO_ROWS:
            return [], 0
        own, foreign = [], 0
        for item in self._store.scan(consistent=True):
            if self._is_own(item):
                own.append(text_of(item, self._shape.key_name) or "")
            else:
                foreign += 1
        return sorted(own, key=lambda key: (key == MIGRATION_KEY, key)), foreign


def deletions(
    client: DynamoDBClient, layout: Layout, clock: Clock
) -> tuple[tuple[DynamoDbDeletion, ...], DynamoDbDeletion]:
    """Return what deletes the tables of an application: first these, then the last one.

    The last one has the pause. After a migration, tables of the former layout may be left.

    Raises:
        AwsError: The layout cannot be read.
    """
    used, former = layout.tables(), layout.former_tables()
    last = used[0] if layout.is_single() else used[-1]
    first = [one for one in (*former, used[0]) if one.name != last.name]

    def deletion(use: TableUse) -> DynamoDbDeletion:
        return DynamoDbDeletion(
            client, TableShape(use.name, use.key_name), partial(is_own, use), clock
        )

    return tuple(deletion(one) for one in first), deletion(last)


def delete_tables(client: DynamoDBClient, names: Iterable[str]) -> None:
    """Delete tables in this order.

    A table that does not exist, or is being deleted, is no error.

    Raises:
        AwsError: A call failed. The tables after it are not deleted.
    """
    for name in names:
        _request_deletion(client, name)


def _request_deletion(client: DynamoDBClient, name: str) -> None:
    try:
        call(client.delete_table, "DeleteTable", name, TableName=name)
    except NotFoundError:
        return
    except InvalidRequestError as error:
        # A table that is being deleted, after a first call without an answer, or being created.
        if error.code != IN_USE:
            raise


def _id_of(table: dict[str, Any]) -> str:
    return str(table.get("TableId") or table.get("CreationDateTime"))
