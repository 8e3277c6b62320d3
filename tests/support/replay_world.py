"""A pipeline on the embedded AWS whose records arrive hours apart, and its replays."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import pyarrow as pa
from deltalake import DeltaTable

from kcl_pipeline import DeltaSink, KinesisPipeline
from kcl_pipeline.aws import AwsClients, SessionOptions, open_tables
from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.control.context import OperationContext
from kcl_pipeline.control.operations import ReplayRequest
from kcl_pipeline.control.replay import RangeReplay

FAST = {
    "lease": {"failover_time_millis": 1000, "lease_discovery_interval_millis": 200},
    "assignment": {"lease_assignment_interval_millis": 200},
    "leader": {"leader_lease_duration_millis": 400, "leader_heartbeat_period_millis": 100},
    "worker": {"disable_worker_metrics": True, "parent_shard_poll_interval_millis": 200},
    "retrieval": {"idle_time_between_reads_in_millis": 200},
    "batch": {"min_batch_interval_millis": 0},
}


def only_data(records: pa.Table) -> pa.Table:
    return records.select(["shard_id", "data"])


class ReplayWorld:
    """The pipeline, its stream, and a clock that is also that of Kinesis."""

    def __init__(self, aws, folder, name, *, shards=2, transform=only_data, **overrides):
        self.aws, self.clock, self.name = aws, aws.clock, name
        self.options = SessionOptions(
            region_name="us-east-1",
            endpoint_url=aws.endpoint_url,
            aws_access_key_id="local",
            aws_secret_access_key="local",
        )
        self.table, self.side = str(folder / "table"), str(folder / "side")
        self.pipeline = KinesisPipeline(
            name=name,
            streams=[name],
            transform_arrow=transform,
            sink=DeltaSink(self.table),
            settings_overrides={**FAST, **overrides},
        )
        self.kinesis = self.clients(self.pipeline.settings).kinesis
        self.kinesis.create_stream(StreamName=name, ShardCount=shards)
        self.tables = open_tables(
            self.pipeline.settings, self.clients(self.pipeline.settings), self.clock
        )

    def clients(self, settings):
        return AwsClients(settings, self.options)

    def put(self, *data, hash_key=None):
        """Put records on all shards, or on that of a hash key."""
        more = {} if hash_key is None else {"ExplicitHashKey": hash_key}
        records = [{"Data": one, "PartitionKey": one.decode(), **more} for one in data]
        self.kinesis.put_records(StreamName=self.name, Records=records)

    def arrivals(self, records):
        """The arrival times of these records, as Kinesis says, in their order."""
        times = {}
        for shard in self.kinesis.list_shards(StreamName=self.name)["Shards"]:
            token = self.kinesis.get_shard_iterator(
                StreamName=self.name, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
            )["ShardIterator"]
            for record in self.kinesis.get_records(ShardIterator=token)["Records"]:
                times[record["Data"]] = record["ApproximateArrivalTimestamp"].astimezone(UTC)
        return [times[data] for data in records]

    def now(self):
        return datetime.fromtimestamp(self.clock.wall(), UTC)

    def drain(self):
        """Read all records with a worker of the pipeline."""
        worker = self.pipeline.build_worker(
            "w-1", clients=self.clients(self.pipeline.settings), clock=self.clock
        )
        return worker.run(self.clock.signal(), mode="drain")

    def replaying(self, stop=None):
        tables = self.tables
        app = ApplicationControl(
            self.pipeline.settings,
            tables.lease,
            tables.workers,
            tables.coordinator,
            self.clock,
            "ann",
        )
        return RangeReplay(OperationContext(lambda: app, self.clients, self.pipeline, stop=stop))

    def plan(self, replay_id=None, begin=None, end=None, **where):
        times = [None if one is None else one.isoformat() for one in (begin, end)]
        request = ReplayRequest(replay_id=replay_id, from_time=times[0], to_time=times[1], **where)
        return self.replaying().plan(request)

    def run(self, plan):
        return self.replaying().run(plan)

    def rows(self, uri):
        """How often each record is in a table."""
        if not DeltaTable.is_deltatable(uri):
            return Counter()
        return Counter(DeltaTable(uri).to_pyarrow_table().column("data").to_pylist())

    def table_names(self):
        dynamodb = self.clients(self.pipeline.settings).dynamodb
        return {one for one in dynamodb.list_tables()["TableNames"] if one.startswith(self.name)}
