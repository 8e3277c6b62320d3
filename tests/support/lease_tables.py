"""The three tables on DynamoDB's interface and in memory, for tests that run on both."""

import itertools
from collections.abc import Iterator

import boto3
import pytest

from kcl_pipeline.aws.configs import dynamodb_config
from kcl_pipeline.config import ConsumerSettings, LeaseSettings, TableSettings
from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.leases.coordinator import CoordinatorStateTable
from kcl_pipeline.leases.dynamodb import DynamoDbStore, TableShape, lease_store
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetricsTable
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.local.faults import FaultRule
from kcl_pipeline.local.server import EmbeddedAws
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.shards import HashKeyRange
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.tables import (
    InMemoryCoordinatorStateTable,
    InMemoryLeaseTable,
    InMemoryWorkerMetricsTable,
    create_lease,
)

NAMES = itertools.count()
KINDS = ("memory", "dynamodb")

KEY = "shardId-000000000000"
HALF = 170141183460469231731687303715884105727
RANGE = HashKeyRange(0, HALF)
FRESH = Lease(KEY, TRIM_HORIZON, hash_key_range=RANGE)
FRESH_ITEM = {
    "leaseKey": {"S": KEY},
    "entityType": {"S": "LEASE"},
    "leaseCounter": {"N": "0"},
    "ownerSwitchesSinceCheckpoint": {"N": "0"},
    "checkpoint": {"S": "TRIM_HORIZON"},
    "checkpointSubSequenceNumber": {"N": "0"},
    "startingHashKey": {"S": "0"},
    "endingHashKey": {"S": str(HALF)},
}
END = Position("49650000000000000000000000000000000000000000000000000002", 0)


class MemoryTables:
    def __init__(self, exists=True):
        self.clock = VirtualClock()
        self.leases = InMemoryLeaseTable("app", clock=self.clock, exists=exists)
        self.workers = InMemoryWorkerMetricsTable(
            "app-WorkerMetricStats", clock=self.clock, exists=exists
        )
        self.coordinator = InMemoryCoordinatorStateTable(
            "app-CoordinatorState", clock=self.clock, exists=exists
        )

    def rows(self, table):
        return table.rows()

    def plant(self, table, item):
        table.plant(item)

    def lose_answer(self, operation):
        """The next request of this kind is applied, and its answer lost."""
        self._hook("after_call", operation)

    def drop_request(self, operation):
        """The next request of this kind is not applied, and has no answer."""
        self._hook("before_call", operation)

    def _hook(self, when, operation):
        armed = [operation]

        def hook(called, key):
            if called in armed:
                armed.clear()
                raise UnavailableError(f"{operation}: no answer", operation=operation)

        for table in (self.leases, self.workers, self.coordinator):
            setattr(table.store, when, hook)


class DynamoTables:
    def __init__(self, aws, client, exists=True):
        self.aws = aws
        self.client = client
        self.clock = VirtualClock()
        self.app = f"app{next(NAMES)}"
        self.leases = LeaseTable(
            lease_store(client, self.app, TableSettings(), LeaseSettings(), self.clock)
        )
        self.workers = WorkerMetricsTable(self._store(f"{self.app}-WorkerMetricStats", "wid"))
        self.coordinator = CoordinatorStateTable(self._store(f"{self.app}-CoordinatorState", "key"))
        if exists:
            for table in (self.leases, self.workers, self.coordinator):
                table.ensure_exists()

    def _store(self, name, key_name):
        shape = TableShape(name, key_name)
        return DynamoDbStore(self.client, shape, TableSettings(), self.clock, scan_segments=1)

    def rows(self, table):
        key = table._store.key_name
        items = self.client.scan(TableName=table.name, ConsistentRead=True)["Items"]
        return {
            item[key]["S"]: _sorted_sets(item) for item in sorted(items, key=lambda i: i[key]["S"])
        }

    def plant(self, table, item):
        self.client.put_item(TableName=table.name, Item=item)

    def lose_answer(self, operation):
        self.aws.fault_rules.replace(
            [FaultRule(service="dynamodb", operation=operation, kind="drop_after", count=1)]
        )

    def drop_request(self, operation):
        self.aws.fault_rules.replace(
            [FaultRule(service="dynamodb", operation=operation, kind="drop_before", count=1)]
        )


def _sorted_sets(item):
    return {
        name: {"SS": sorted(value["SS"])} if "SS" in value else value
        for name, value in item.items()
    }


def make_client(aws, **changes):
    config = dynamodb_config(ConsumerSettings(application_name="app", streams=("orders",)))
    return boto3.client(
        "dynamodb",
        endpoint_url=aws.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id="local",
        aws_secret_access_key="local",
        config=config,
        **changes,
    )


@pytest.fixture(scope="module", name="aws")
def aws_fixture() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as server:
        yield server


@pytest.fixture(scope="module", name="client")
def client_fixture(aws):
    client = make_client(aws)
    yield client
    client.close()


@pytest.fixture(params=KINDS, name="tables")
def tables_fixture(request):
    if request.param == "memory":
        return MemoryTables()
    return DynamoTables(request.getfixturevalue("aws"), request.getfixturevalue("client"))


def row(tables, key=KEY):
    return tables.rows(tables.leases).get(key)


def owned(tables, owner="w1", **changes):
    """A lease in the table that `owner` holds."""
    create_lease(tables.leases, FRESH.with_(**changes))
    return tables.leases.assign(FRESH.with_(**changes), owner)
