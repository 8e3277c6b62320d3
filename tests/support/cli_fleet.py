"""What the tests of the command line share: an application on the embedded AWS, and a way to run
commands.
"""

import itertools
import json
from types import SimpleNamespace

from typer.testing import CliRunner

from kcl_pipeline.aws import AwsClients, SessionOptions, open_kinesis, open_tables
from kcl_pipeline.cli import app
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.coordinator import LeaderLock, MigrationState
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.workers import WorkerMetrics
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.testing.tables import create_lease

NUMBERS = itertools.count(1)


def build_fleet(server):
    """Tables, rows, and a stream of their own."""
    name = f"app-{next(NUMBERS):03}"
    settings = ConsumerSettings(application_name=name, streams=(name,))
    clock = SystemClock()
    options = SessionOptions(
        region_name="us-east-1",
        endpoint_url=server.endpoint_url,
        aws_access_key_id="local",
        aws_secret_access_key="local",
    )
    clients = AwsClients(settings, options)
    clients.kinesis.create_stream(StreamName=name, ShardCount=4)
    tables, kinesis = open_tables(settings, clients, clock), open_kinesis(settings, clients, clock)
    for table in (tables.lease, tables.workers, tables.coordinator):
        table.ensure_exists()
    shards = kinesis.list_shards(kinesis.resolve_stream(name, multi_stream=False))
    owners = ["blue-1", "blue-2", "blue-2", None]
    for number, (shard, owner) in enumerate(zip(shards, owners, strict=True)):
        checkpoint = TRIM_HORIZON if owner is None else Position("4965" + str(number))
        lease = Lease(
            shard.shard_id,
            checkpoint,
            counter=number,
            owner=owner,
            hash_key_range=shard.hash_key_range,
            throughput_kbps=None if owner is None else 10.5 * number,
        )
        assert create_lease(tables.lease, lease)
    tables.workers.report(
        WorkerMetrics(
            "blue-1", int(clock.wall()), {"C": (10.0, 20.0)}, {"C": (100,)}, run_id="run-1"
        )
    )
    tables.workers.report(
        WorkerMetrics("blue-2", int(clock.wall()) - 100, {"C": (50.0, -1.0)}, {"C": (90,)})
    )
    assert tables.coordinator.put_lock(LeaderLock("blue-1", 30_000, "v1"), replacing=None)
    assert tables.coordinator.put_migration(
        MigrationState("CLIENT_VERSION_3X", "blue-1", 1), replacing=None
    )
    return SimpleNamespace(
        name=name,
        tables=tables,
        settings=settings,
        clients=clients,
        kinesis=kinesis,
        keys=[s.shard_id for s in shards],
    )


def run(*arguments, code=0):
    """Run a command; never a traceback."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    assert "Traceback" not in result.output + result.stderr
    return result


def run_json(*arguments, code=0):
    """Run a command with --json; returns what it says."""
    return json.loads(run(*arguments, "--json", code=code).stdout)
