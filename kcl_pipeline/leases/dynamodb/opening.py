"""Open the DynamoDB tables of an application in whichever layout it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings, TableSettings
from kcl_pipeline.leases.dynamodb.leases import lease_store
from kcl_pipeline.leases.dynamodb.schema import TableShape
from kcl_pipeline.leases.dynamodb.store import DynamoDbStore
from kcl_pipeline.leases.layout.layout import Layout
from kcl_pipeline.leases.layout.opening import Tables, open_rows
from kcl_pipeline.leases.store import MapCallable, serial_map

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


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
        wanted=settings.table_layout,
        migrates=settings.leader.migrate_all_entities_to_lease_table,
        clock=clock,
    )
    return open_rows(layout, clock, settings.leader.table_migration_complete_bake_time_seconds)
