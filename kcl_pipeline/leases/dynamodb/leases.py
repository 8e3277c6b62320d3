"""The lease table in DynamoDB."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import LeaseSettings, TableSettings
from kcl_pipeline.leases.dynamodb.schema import Index, TableShape
from kcl_pipeline.leases.dynamodb.store import DynamoDbStore
from kcl_pipeline.leases.lease.serialization import LEASE_KEY, OWNER
from kcl_pipeline.leases.store import MapCallable, serial_map

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

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
