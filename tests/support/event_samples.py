"""One event of each type, at least."""

from __future__ import annotations

from kcl_pipeline import events as ev
from kcl_pipeline.events import TOO_MANY_FAILURES
from kcl_pipeline.position import Position
from kcl_pipeline.worker_status import WorkerStatus, lags_of


def lag_measured(millis: dict[str, int], unknown: int = 0) -> ev.StatusMeasured:
    """Return the measurement of a worker that knows only its lag."""
    worst = max(millis.values(), default=None)
    return ev.StatusMeasured("w1", WorkerStatus(worst, unknown, lags=lags_of(millis)))


BATCH = ev.BatchCommitted(
    "w1",
    "b-1",
    100,
    2048,
    ("shardId-1",),
    {"write": 20.0, "commit": 6.0, "job": 9.0, "rewrite": 1.0},
    7,
    {"shardId-1": 100},
    {"shardId-1": 2000},
)

SAMPLES = [
    ev.WorkerStarted("w1"),
    ev.WorkerStopped("w1", "stopped"),
    ev.LeaseGained("w1", "shardId-1", 4),
    ev.LeaseLost("w1", "shardId-1", "renewal refused"),
    ev.LeaseReleased("w1", "shardId-1"),
    ev.DrainWaits("w1", 30.0, "shardId-1: it has no owner"),
    ev.ShardsLeftToOthers("w1", 6, 4, "w2 (3), w3 (1)"),
    ev.HandoffStarted("shardId-1", "w1", "w2"),
    ev.HandoffCompleted("shardId-1", "w1", "w2", 1.5),
    ev.ShardEnded("w1", "123:orders:9:shardId-1", ("123:orders:9:shardId-3",)),
    BATCH,
    ev.BatchRefused("w1", "b-1", ("shardId-1",), "lost"),
    ev.RecordsDeadLettered("w1", "shardId-1", 3, "ValueError"),
    ev.DeadLettersUnreadable("/lake/dead", 2, "shardId-1 at 7 of w1-1"),
    ev.ClientVersionChanged(
        "w1", "CLIENT_VERSION_UPGRADE_FROM_2X", "CLIENT_VERSION_2X", "KclMigrationTool-rollback"
    ),
    ev.AggregatesRejected("shardId-1", "7", 1, 2, 3),
    ev.ShardPaused("w1", "shardId-1", "3 of 4 records fail", 2, 30.0, 60.0),
    ev.ShardResumed("w1", "shardId-1", 3, 90.0),
    ev.RecordsLost("w1", "shardId-1", ev.LossReason.ROW_DELETED, Position("7")),
    ev.TableRestored(58, "version 12", "t-1"),
    ev.ShardStalled("w1", "123:orders:9:shardId-1", ev.StallStep.READING, 120.0, "no answer"),
    ev.StreamsDiffer("w1", ("clicks",)),
    ev.StreamUnavailable("w1", "clicks", "not found"),
    ev.WorkerHung(
        "w1",
        ev.HangStep.WRITING,
        900.0,
        ("shardId-1",),
        'Thread a (most recent call first):\n  File "b.py", line 1 in c',
    ),
    ev.WorkerResumed("w1"),
    ev.DefectFound("reading s1", "KeyError: 'x'"),
    ev.BatchAbandoned("w1", ev.HangStep.WRITING, 20.0),
    ev.WorkerIdShared("w1", "run-2"),
    ev.AnnouncementRejected("_kcl_pipeline/announced/0.json", "it is malformed", True),
    ev.ArrowMemorySkipped("Spark 5.0.0 is not one of the versions 4.0, 4.1"),
    ev.AwsTrouble("GetRecords of shardId-1", "throttled"),
    ev.LeaderElected("w1"),
    ev.LeadershipLost("w1", "released"),
    ev.LeadershipLost("w1", TOO_MANY_FAILURES),
    ev.RecordsDeadLettered("w1", "shardId-1", 1, "ValueError", skipped=True),
    ev.LeasesCreated("orders", ("shardId-1", "shardId-2"), "empty table"),
    ev.LeaseDeleted("shardId-1", "ended"),
    ev.HoleFound("orders", "a gap", 1),
    ev.PlanMade("balanced", 2, 1, 0, 3.0),
    ev.LeaseMoved("shardId-1", "w1", "w2", graceful=True, reason="balance"),
    ev.MoveRefused("shardId-1", "w2"),
    ev.DrainRequested("w1", "the application is paused"),
    ev.CycleFailed("boom", 1),
    ev.CpuSourceSkipped("EcsCpu", "TimeoutError: no answer"),
    ev.RowRejected("orders", "shardId-1", "checkpoint is missing"),
    ev.TaskFinished("w1", ev.LeaseTask.RENEWAL, 4.0, 2),
    ev.TaskFinished("w1", ev.LeaseTask.DISCOVERY, 5.0, 1),
    ev.TaskFinished("w1", ev.LeaseTask.REPORT, 6.0, succeeded=False),
    ev.StatusMeasured(
        "w1",
        WorkerStatus(
            1500,
            1,
            lags=lags_of({"123:orders:9:shardId-1": 1500, "shardId-2": 0}),
            memory_bytes=3_000_000,
            memory_limit_bytes=536_870_912,
        ),
    ),
    ev.ProcessorCalled("w-1", "shardId-1", 10, 12.0, succeeded=True),
    ev.ReadFinished("shardId-1", 12.0, succeeded=True),
    ev.CycleFinished("w1", False, 1.0, True),
    ev.CycleFinished("w1", True, 30.0, True, leases=4, workers=2, streams=1),
    ev.MetricsEndpointOpened("prometheus", "http://127.0.0.1:9464/metrics"),
    ev.MetricsExportFailed("prometheus", "no port is free"),
    ev.MetricsDropped("cloudwatch", 3, "the queue is full"),
]
