"""Create a table and wait for it (protocol §1.1).

An existing table is not changed, except for a missing index and point-in-time recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import TableSettings
from kcl_pipeline.errors import (
    IncompatibleTableError,
    InvalidRequestError,
    NotFoundError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.leases.aws_errors import IN_USE, call

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

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
