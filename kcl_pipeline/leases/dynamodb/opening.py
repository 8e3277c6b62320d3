"""Open the DynamoDB tables of an application in whichever layout it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings, LeaseSettings, TableSettings
from kcl_pipeline.leases.dynamodb.schema import Index, TableShape
from kcl_pipeline.leases.dynamodb.store import DynamoDbStore
from kcl_pipeline.leases.layout.layout import Layout
from kcl_pipeline.leases.layout.opening import Tables, open_rows
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
