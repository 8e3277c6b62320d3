"""The Kinesis Client Library 3.x in Python, as a Dagster package.

Everything that users need is here: the pipeline and its sinks, the Spark data source, the Dagster
resources, errors and events, assignment strategies, and the embedded AWS. `kcl_pipeline.testing`
has what tests of a pipeline need. Other modules can change in any version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kcl_pipeline.version import __version__

if TYPE_CHECKING:
    from kcl_pipeline.aws import AwsClients, SessionOptions
    from kcl_pipeline.batch import RECORD_SCHEMA
    from kcl_pipeline.config import ConsumerSettings
    from kcl_pipeline.delta.settings import DeltaSink
    from kcl_pipeline.errors import (
        AccessDeniedError,
        ApplicationInUseError,
        ApplicationPausedError,
        AwsError,
        BrokenTransformError,
        CommitStoppedError,
        ExpiredIteratorError,
        IncompatibleTableError,
        InvalidRequestError,
        KclError,
        LeaseLostError,
        NotFoundError,
        OtherApplicationError,
        OtherTableError,
        RecordsLostError,
        ResultMismatchError,
        SettingsError,
        ShardSyncError,
        SinkError,
        StreamReplacedError,
        TableMismatchError,
        ThrottledError,
        TransformFailedError,
        UnavailableError,
        UnreadableRowError,
        WorkerIdTakenError,
    )
    from kcl_pipeline.events import (
        AggregatesRejected,
        AnnouncementRejected,
        ArrowMemorySkipped,
        AwsTrouble,
        BatchAbandoned,
        BatchCommitted,
        BatchRefused,
        ClientVersionChanged,
        CpuSourceSkipped,
        CycleFailed,
        CycleFinished,
        DeadLettersUnreadable,
        DefectFound,
        DrainRequested,
        DrainWaits,
        Event,
        EventSink,
        HandoffCompleted,
        HandoffStarted,
        HangStep,
        HoleFound,
        LeaderElected,
        LeadershipLost,
        LeaseDeleted,
        LeaseGained,
        LeaseLost,
        LeaseMoved,
        LeaseReleased,
        LeasesCreated,
        LeaseTask,
        LossReason,
        Measurement,
        MetricsDropped,
        MetricsEndpointOpened,
        MetricsExportFailed,
        MoveRefused,
        PlanMade,
        ProcessorCalled,
        ReadFinished,
        RecordsDeadLettered,
        RecordsLost,
        RowRejected,
        ShardEnded,
        ShardPaused,
        ShardResumed,
        ShardsLeftToOthers,
        ShardStalled,
        StallStep,
        StatusMeasured,
        StreamsDiffer,
        StreamUnavailable,
        TableRestored,
        TaskFinished,
        WorkerHung,
        WorkerIdShared,
        WorkerResumed,
        WorkerStarted,
        WorkerStopped,
        ignore_events,
    )
    from kcl_pipeline.foreach import BatchIdentity, ForeachArrowSink, ForeachBatchSink, ShardRange
    from kcl_pipeline.local import EmbeddedAws, Fault, FaultRule
    from kcl_pipeline.local.shared import use_local_aws
    from kcl_pipeline.orchestration.component import KinesisPipelineComponent
    from kcl_pipeline.orchestration.options import DagsterOptions
    from kcl_pipeline.orchestration.resources import (
        AwsResource,
        CoordinatorStateTableResource,
        LeaseTableResource,
        WorkerMetricsTableResource,
    )
    from kcl_pipeline.orchestration.spark import SparkResource
    from kcl_pipeline.pipeline import Fleet, KinesisPipeline
    from kcl_pipeline.planning.model import (
        LeaseState,
        Move,
        Plan,
        PlanInput,
        PlanLimits,
        Strategy,
        WorkerState,
    )
    from kcl_pipeline.planning.strategies import register as register_strategy
    from kcl_pipeline.processors import (
        Checkpointer,
        CheckpointError,
        InitializeInput,
        LeaseLostInput,
        PreparedCheckpoint,
        ProcessRecordsInput,
        Record,
        RecordProcessor,
        ShardEndedInput,
        ShutdownRequestedInput,
    )
    from kcl_pipeline.spark.data_source.source import KinesisDataSource
    from kcl_pipeline.spark.java import java_command
    from kcl_pipeline.spark.session import build_session
    from kcl_pipeline.status.limits import CheckLimits
    from kcl_pipeline.stream_config import StreamConfig, StreamSelector
    from kcl_pipeline.worker.summary import StopReason, WorkerSummary
    from kcl_pipeline.worker.worker import Worker
    from kcl_pipeline.worker_status import WorkerStatus, WorkerTotals

__all__ = [
    "RECORD_SCHEMA",
    "AccessDeniedError",
    "AggregatesRejected",
    "AnnouncementRejected",
    "ApplicationInUseError",
    "ApplicationPausedError",
    "ArrowMemorySkipped",
    "AwsClients",
    "AwsError",
    "AwsResource",
    "AwsTrouble",
    "BatchAbandoned",
    "BatchCommitted",
    "BatchIdentity",
    "BatchRefused",
    "BrokenTransformError",
    "CheckLimits",
    "CheckpointError",
    "Checkpointer",
    "ClientVersionChanged",
    "CommitStoppedError",
    "ConsumerSettings",
    "CoordinatorStateTableResource",
    "CpuSourceSkipped",
    "CycleFailed",
    "CycleFinished",
    "DagsterOptions",
    "DeadLettersUnreadable",
    "DefectFound",
    "DeltaSink",
    "DrainRequested",
    "DrainWaits",
    "EmbeddedAws",
    "Event",
    "EventSink",
    "ExpiredIteratorError",
    "Fault",
    "FaultRule",
    "Fleet",
    "ForeachArrowSink",
    "ForeachBatchSink",
    "HandoffCompleted",
    "HandoffStarted",
    "HangStep",
    "HoleFound",
    "IncompatibleTableError",
    "InitializeInput",
    "InvalidRequestError",
    "KclError",
    "KinesisDataSource",
    "KinesisPipeline",
    "KinesisPipelineComponent",
    "LeaderElected",
    "LeadershipLost",
    "LeaseDeleted",
    "LeaseGained",
    "LeaseLost",
    "LeaseLostError",
    "LeaseLostInput",
    "LeaseMoved",
    "LeaseReleased",
    "LeaseState",
    "LeaseTableResource",
    "LeaseTask",
    "LeasesCreated",
    "LossReason",
    "Measurement",
    "MetricsDropped",
    "MetricsEndpointOpened",
    "MetricsExportFailed",
    "Move",
    "MoveRefused",
    "NotFoundError",
    "OtherApplicationError",
    "OtherTableError",
    "Plan",
    "PlanInput",
    "PlanLimits",
    "PlanMade",
    "PreparedCheckpoint",
    "ProcessRecordsInput",
    "ProcessorCalled",
    "ReadFinished",
    "Record",
    "RecordProcessor",
    "RecordsDeadLettered",
    "RecordsLost",
    "RecordsLostError",
    "ResultMismatchError",
    "RowRejected",
    "SessionOptions",
    "SettingsError",
    "ShardEnded",
    "ShardEndedInput",
    "ShardPaused",
    "ShardRange",
    "ShardResumed",
    "ShardStalled",
    "ShardSyncError",
    "ShardsLeftToOthers",
    "ShutdownRequestedInput",
    "SinkError",
    "SparkResource",
    "StallStep",
    "StatusMeasured",
    "StopReason",
    "Strategy",
    "StreamConfig",
    "StreamReplacedError",
    "StreamSelector",
    "StreamUnavailable",
    "StreamsDiffer",
    "TableMismatchError",
    "TableRestored",
    "TaskFinished",
    "ThrottledError",
    "TransformFailedError",
    "UnavailableError",
    "UnreadableRowError",
    "Worker",
    "WorkerHung",
    "WorkerIdShared",
    "WorkerIdTakenError",
    "WorkerMetricsTableResource",
    "WorkerResumed",
    "WorkerStarted",
    "WorkerState",
    "WorkerStatus",
    "WorkerStopped",
    "WorkerSummary",
    "WorkerTotals",
    "__version__",
    "build_session",
    "ignore_events",
    "java_command",
    "register_strategy",
    "use_local_aws",
]

_NAMES: Final = {
    "status.limits": "CheckLimits",
    "aws": "AwsClients SessionOptions",
    "batch": "RECORD_SCHEMA",
    "orchestration.options": "DagsterOptions",
    "orchestration.component": "KinesisPipelineComponent",
    "config": "ConsumerSettings",
    "delta.settings": "DeltaSink",
    "foreach": "BatchIdentity ForeachArrowSink ForeachBatchSink ShardRange",
    "local": "EmbeddedAws Fault FaultRule",
    "local.shared": "use_local_aws",
    "pipeline": "Fleet KinesisPipeline",
    "planning.model": "LeaseState Move Plan PlanInput PlanLimits Strategy WorkerState",
    "planning.strategies": "register_strategy",
    "orchestration.resources": "AwsResource CoordinatorStateTableResource LeaseTableResource "
    "WorkerMetricsTableResource",
    "orchestration.spark": "SparkResource",
    "processors": "CheckpointError Checkpointer InitializeInput LeaseLostInput PreparedCheckpoint "
    "ProcessRecordsInput Record RecordProcessor ShardEndedInput ShutdownRequestedInput",
    "spark.data_source.source": "KinesisDataSource",
    "spark.java": "java_command",
    "spark.session": "build_session",
    "stream_config": "StreamConfig StreamSelector",
    "worker.summary": "StopReason WorkerSummary",
    "worker.worker": "Worker",
    "worker_status": "WorkerStatus WorkerTotals",
}
"""Names by module, except errors and events. A test compares them with the imports above."""

_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}
_RENAMED: Final = {"register_strategy": "register"}


def __getattr__(name: str) -> Any:
    """Load a public name on first use.

    The import of this package therefore loads neither boto3 nor Dagster nor Spark.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415 (an import of one submodule does not need it)

    path = _MODULES.get(name, "errors" if name.endswith("Error") else "events")
    module = importlib.import_module(f"{__name__}.{path}")
    found = globals()[name] = getattr(module, _RENAMED.get(name, name))
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
