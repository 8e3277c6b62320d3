"""Delete the DynamoDB tables of a retired application, and those of a replay.

A table is identified by its id, so a repeated call never deletes a table that another process has
created under the same name since. The answer of DeleteTable may be lost: DescribeTable then shows
that the table is being deleted, or gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import TableSettings
from kcl_pipeline.errors import IncompatibleTableError, InvalidRequestError, NotFoundError
from kcl_pipeline.leases.attributes import text_of
from kcl_pipeline.leases.aws_errors import IN_USE, call
from kcl_pipeline.leases.coordinator_keys import COORDINATOR_KEYS, MIGRATION_KEY
from kcl_pipeline.leases.deletion import Presence, TableFound
from kcl_pipeline.leases.dynamodb.schema import TableShape
from kcl_pipeline.leases.dynamodb.store import DynamoDbStore
from kcl_pipeline.leases.layout.layout import Layout, TableUse
from kcl_pipeline.leases.lease import serialization as leases
from kcl_pipeline.leases.state import serialization as state
from kcl_pipeline.leases.store import Item

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

STREAM_ENTITY: Final = "STREAM"
_NO_ROWS: Final = frozenset({"CREATING", "DELETING"})


def is_own(use: TableUse, item: Item) -> bool:
    """Return whether a row, readable or not, belongs to the application that uses the table."""
    key = text_of(item, "key") or text_of(item, leases.LEASE_KEY)
    return (
        (
            use.has_leases
            and leases.is_lease(item)
            and (leases.CHECKPOINT in item or leases.COUNTER in item)
        )
        or (
            use.has_workers
            and state.is_worker(item)
            and (state.LAST_UPDATE in item or state.STATS in item)
        )
        or (
            use.has_state
            and (key in COORDINATOR_KEYS or text_of(item, leases.ENTITY_TYPE) == STREAM_ENTITY)
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
