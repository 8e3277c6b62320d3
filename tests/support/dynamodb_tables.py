"""Lease tables on the embedded DynamoDB."""

from kcl_pipeline.config import LeaseSettings, TableSettings
from kcl_pipeline.leases.dynamodb.leases import DynamoDbLeaseTable
from kcl_pipeline.testing.clock import VirtualClock
from tests.support.lease_tables import (  # noqa: F401
    DynamoTables,
    MemoryTables,
    aws_fixture,
    client_fixture,
    make_client,
)


def lease_table(client, name, clock=None, lease_settings=None, **table):
    return DynamoDbLeaseTable(
        client,
        name,
        TableSettings(**table),
        lease_settings or LeaseSettings(),
        clock or VirtualClock(),
    )
