"""The coordinator-state table in DynamoDB."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import TableSettings
from kcl_pipeline.leases.coordinator_rows import CoordinatorRows
from kcl_pipeline.leases.dynamodb.schema import TableShape
from kcl_pipeline.leases.dynamodb.store import DynamoDbStore

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


class DynamoDbCoordinatorStateTable(CoordinatorRows):
    """The coordinator-state table in DynamoDB, key `key` (protocol §3.1)."""

    def __init__(
        self, client: DynamoDBClient, name: str, settings: TableSettings, clock: Clock
    ) -> None:
        super().__init__(
            DynamoDbStore(client, TableShape(name, "key"), settings, clock, scan_segments=1)
        )
