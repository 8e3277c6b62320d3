"""The worker-metrics table in DynamoDB."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import TableSettings
from kcl_pipeline.leases.dynamodb.schema import TableShape
from kcl_pipeline.leases.dynamodb.store import DynamoDbStore
from kcl_pipeline.leases.worker_rows import WorkerRows

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


class DynamoDbWorkerMetricsTable(WorkerRows):
    """The worker-metrics table in DynamoDB, key `wid` (protocol §2.1)."""

    def __init__(
        self, client: DynamoDBClient, name: str, settings: TableSettings, clock: Clock
    ) -> None:
        super().__init__(
            DynamoDbStore(client, TableShape(name, "wid"), settings, clock, scan_segments=1)
        )
