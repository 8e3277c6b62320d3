"""Lease tables on the embedded DynamoDB."""

from kcl_pipeline.config import LeaseSettings, TableSettings
from kcl_pipeline.leases.dynamodb import lease_store
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.testing.clock import VirtualClock
from tests.support.lease_tables import (  # noqa: F401
    DynamoTables,
    MemoryTables,
    aws_fixture,
    client_fixture,
    make_client,
)


def lease_table(client, name, clock=None, lease_settings=None, **table):
    settings, leases = TableSettings(**table), lease_settings or LeaseSettings()
    return LeaseTable(lease_store(client, name, settings, leases, clock or VirtualClock()))
