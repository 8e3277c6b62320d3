"""Bounded runs with real workers as threads, the real sensor, and the embedded AWS.

Dagster's daemon and launcher are played: each run that the sensor asks for is a thread with the
worker that the op would build. The time of a worker is a few seconds, so that each one is replaced
while records arrive.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from queue import SimpleQueue

import dagster as dg
import pytest
from dagster import DagsterEventType as Kind
from dagster import DagsterRunStatus as S
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from kcl_pipeline import DeltaSink, Fleet, KinesisPipeline
from kcl_pipeline.aws import AwsClients
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.events import Event, HandoffStarted
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.orchestration.definitions import build_resources
from kcl_pipeline.orchestration.leader import LeaderTick
from kcl_pipeline.orchestration.names import REPLACES_TAG, Names, worker_id_of
from kcl_pipeline.orchestration.options import DagsterOptions
from kcl_pipeline.orchestration.resources import AwsResource
from kcl_pipeline.worker.summary import StopReason, WorkerSummary

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SHARDS = 4
WORKERS = 2
LONGEST_SECONDS = 200.0
PAUSE_SECONDS = 0.5
STREAM = "orders"


class Application:
    """The application, its sensor, and the runs.

    Attributes:
        summaries: How each worker ended, by its id.
        moves: For each change of the actual owner of a lease, the former and the new owner.
    """

    def __init__(self, aws: EmbeddedAws, folder: Path, instance: dg.DagsterInstance) -> None:
        environment = aws.environment()
        self.aws = AwsResource(
            endpoint_url=aws.endpoint_url,
            region_name=environment["AWS_DEFAULT_REGION"],
            aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        )
        self.pipeline = KinesisPipeline(
            "bounded",
            [STREAM],
            DeltaSink(str(folder / "rows")),
            workers=Fleet(min=WORKERS, max=WORKERS, run_hours=0.0015, code_version="one"),
            settings_overrides={
                "worker": {"worker_metrics_reporter_freq_in_millis": 1_000},
                "lease": {"failover_time_millis": 6_000},
            },
        )
        self.names = Names.of(self.pipeline)
        self.instance = instance
        self.clock = SystemClock()
        options = DagsterOptions(aws=self.aws)
        self.tick = LeaderTick(self.pipeline, self.names, options, self.clock)
        self.resources = build_resources(self.pipeline, self.names, options)
        self.cursor: str | None = None
        self.summaries: dict[str, WorkerSummary] = {}
        self.threads: list[threading.Thread] = []
        self.ended: SimpleQueue[dg.DagsterRun] = SimpleQueue()
        self.stop = threading.Event()
        self.owners: dict[str, str] = {}
        self.moves: list[tuple[str, str]] = []
        self.events: list[Event] = []
        self.first: set[str] = set()
        self.sent = 0

    def clients(self) -> AwsClients:
        return self.aws.clients(self.pipeline.settings)

    def put(self, count: int) -> None:
        values = [f"record-{number}" for number in range(self.sent, self.sent + count)]
        records = [{"Data": value.encode(), "PartitionKey": value} for value in values]
        answer = self.clients().kinesis.put_records(StreamName=STREAM, Records=records)
        assert not answer["FailedRecordCount"]
        self.sent += count

    def evaluate(self) -> str:
        """Run one tick, and start the runs that it asks for. Returns the sentence of the tick.

        Only this thread writes to the instance, whose database is in memory.
        """
        while not self.ended.empty():
            self._note(self.ended.get(), Kind.RUN_SUCCESS)
        with dg.build_sensor_context(
            instance=self.instance,
            cursor=self.cursor,
            resources=self.resources,
            sensor_name=self.names.leader_sensor,
        ) as context:
            result = self.tick(context)
        self.cursor = result.cursor
        for request in result.run_requests or ():
            job = dg.JobDefinition(name=self.names.consume_job, graph_def=dg.GraphDefinition("g"))
            run = self.instance.create_run_for_job(job, status=S.STARTED, tags=request.tags)
            self._note(run, Kind.RUN_START)
            thread = threading.Thread(target=self._work, args=(run,), daemon=True)
            self.threads.append(thread)
            thread.start()
        return str(result.cursor)

    def _note(self, run: dg.DagsterRun, kind: Kind) -> None:
        event = dg.DagsterEvent(event_type_value=kind.value, job_name=run.job_name)
        self.instance.run_storage.handle_run_event(run.run_id, event)

    def _work(self, run: dg.DagsterRun) -> None:
        """What the op does."""
        worker_id = worker_id_of(self.pipeline.name, run.run_id)
        if REPLACES_TAG not in run.tags:
            self.first.add(worker_id)
        worker = self.pipeline.build_worker(
            worker_id,
            clients=self.clients(),
            events=self.events.append,
            run_id=run.run_id,
            replaces=run.tags.get(REPLACES_TAG),
            leader_patience_seconds=20.0,
        )
        self.summaries[worker_id] = worker.run(self.stop)
        self.ended.put(run)

    def look(self) -> None:
        """Note the leases that have moved since the last look."""
        rows = self.clients().dynamodb.scan(TableName=self.pipeline.settings.lease_table_name)
        for row in rows["Items"]:
            owner = row.get("checkpointOwner", row.get("leaseOwner", {})).get("S")
            key = row["leaseKey"]["S"]
            if owner is not None and self.owners.get(key) not in (None, owner):
                self.moves.append((self.owners[key], owner))
            if owner is not None:
                self.owners[key] = owner

    def rows(self) -> Counter[str]:
        try:
            table = DeltaTable(self.pipeline.sink.uri).to_pyarrow_table(columns=["data"])
        except TableNotFoundError:
            return Counter()
        return Counter(value.decode() for value in table["data"].to_pylist())


@pytest.mark.parametrize("replacements", [2, pytest.param(4, marks=pytest.mark.long)])
def test_workers_follow_each_other_and_each_record_is_in_the_table_once(
    tmp_path: Path, replacements: int
) -> None:
    with EmbeddedAws() as aws, dg.DagsterInstance.ephemeral() as instance:
        application = Application(aws, tmp_path, instance)
        application.clients().kinesis.create_stream(StreamName=STREAM, ShardCount=SHARDS)
        deadline = time.monotonic() + LONGEST_SECONDS
        sentence = ""
        try:
            while len(application.summaries) < replacements:
                assert time.monotonic() < deadline, sentence
                sentence = application.evaluate()
                application.put(20)
                if application.rows():
                    application.look()
                time.sleep(PAUSE_SECONDS)
            ended = dict(application.summaries)
            while len(application.rows()) < application.sent:
                assert time.monotonic() < deadline, sentence
                application.evaluate()
                time.sleep(PAUSE_SECONDS)
        finally:
            application.stop.set()
            for thread in application.threads:
                thread.join(60)
        application.look()
        assert application.rows() == Counter(f"record-{n}" for n in range(application.sent))
        assert {summary.reason for summary in ended.values()} == {StopReason.DRAIN_REQUESTED}
        assert sum(one.total.records for one in application.summaries.values()) == application.sent
        handed_over = [summary.total.handoffs for summary in ended.values()]
        assert all(number <= SHARDS for number in handed_over), handed_over
        moved = Counter(former for former, _ in application.moves)
        for worker_id, summary in ended.items():
            assert moved[worker_id] <= summary.total.handoffs, "its leases went by handoffs alone"
            # Not from the rows: a lease may move twice between two looks. The first workers are
            # balanced among themselves.
            handoffs = [e for e in application.events if isinstance(e, HandoffStarted)]
            taken = {handoff.to_worker for handoff in handoffs if handoff.from_worker == worker_id}
            taken -= application.first
            assert len(taken) <= 1, "to its successor"
