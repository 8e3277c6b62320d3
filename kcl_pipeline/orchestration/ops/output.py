"""Define the output asset and the job of the workers.

Materializing the asset reads what is there now. A run of the job is one continuous worker.
"""

from collections.abc import Iterator
from typing import Any

import dagster as dg

from kcl_pipeline.batch import dead_letter_address
from kcl_pipeline.foreach import ForeachBatchSink
from kcl_pipeline.orchestration.assets.access import PipelineResources
from kcl_pipeline.orchestration.assets.contract import DagsterOptions, PipelineLike
from kcl_pipeline.orchestration.assets.names import (
    CONTINUOUS,
    DRAIN,
    VERSION_TAG,
    Names,
    table_uri,
)
from kcl_pipeline.orchestration.assets.specs import group_of
from kcl_pipeline.orchestration.ops.consume import run_worker
from kcl_pipeline.processors import ProcessorSink


def build_output_asset(
    pipeline: PipelineLike, names: Names, options: DagsterOptions
) -> dg.AssetsDefinition:
    """The table. Its computation is one KCL worker that drains the streams."""
    uri = table_uri(pipeline.sink)
    metadata: dict[str, Any] = {"dagster/uri": uri} if uri else {}
    letters = dead_letter_address(pipeline.sink)
    if letters is not None:
        metadata["dead_letters"] = dg.MetadataValue.path(letters)

    @dg.asset(
        key=names.output,
        deps=[names.selected_streams] if names.selects_streams else list(names.streams_keys),
        group_name=group_of(names, options),
        kinds=_kinds(pipeline),
        owners=list(options.owners),
        tags=dict(options.tags),
        metadata=metadata,
        required_resource_keys={names.aws, names.spark},
        output_required=False,
        description=(
            f"Output of `{names.application}`, which reads "
            f"{', '.join(f'`{s}`' for s in names.streams)}. A materialization runs one worker "
            "that reads up to the current end of every shard, commits, and stops. "
            f"The sensor `{names.leader_sensor}` keeps continuous workers running, as runs of "
            f"`{names.consume_job}`. {_guarantee(pipeline)}, with any number of workers. "
            "The values below are those of the last period in which data was committed, with its "
            "time. While nothing arrives, the plots go on, and the check `lag_below_threshold` "
            "says since when nothing has arrived, and whether records wait."
        ),
    )
    def drain(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        resources = PipelineResources(names, context)
        landed = run_worker(
            context.op_execution_context,
            pipeline,
            names,
            options,
            DRAIN,
            spark=resources.spark,
            clients=resources.aws.clients(pipeline.settings),
        )
        # A generator, because a returned value is always a materialization.
        if landed is not None:
            yield dg.MaterializeResult(metadata=landed)

    return drain


def _kinds(pipeline: PipelineLike) -> set[str]:
    sink = pipeline.sink
    has_frames = pipeline.transform is not None or isinstance(sink, ForeachBatchSink)
    table = {"deltalake"} if table_uri(sink) else set[str]()
    return {"kinesis", "spark" if has_frames else "arrow"} | table


def _guarantee(pipeline: PipelineLike) -> str:
    if table_uri(pipeline.sink):
        return "Each record is in the table exactly once"
    if isinstance(pipeline.sink, ProcessorSink):
        return "The record processors get each record at least once"
    return "The function of the sink gets each record at least once"


def build_consume_job(
    pipeline: PipelineLike, names: Names, options: DagsterOptions, version: str
) -> dg.JobDefinition:
    """The job that the leader sensor starts: one continuous worker.

    A plain op job, not a job of the output asset. As long as a run targets an asset, Dagster holds
    the asset to be in progress, and `AutomationCondition.eager()` of the assets downstream waits.

    The worker runs in the process of the run, so that it cannot outlive a killed run.
    """

    @dg.op(
        name=f"{names.prefix}_worker",
        required_resource_keys={names.aws, names.spark},
        description=f"One worker of `{names.application}`. It consumes until the run is "
        "terminated, the leader asks it to drain, or the application is paused.",
    )
    def work(context: dg.OpExecutionContext) -> None:
        resources = PipelineResources(names, context)
        landed = run_worker(
            context,
            pipeline,
            names,
            options,
            CONTINUOUS,
            spark=resources.spark,
            clients=resources.aws.clients(pipeline.settings),
        )
        if landed is not None:
            context.log_event(dg.AssetMaterialization(names.output, metadata=landed))

    @dg.job(
        name=names.consume_job,
        executor_def=dg.in_process_executor,
        tags={**names.worker_run_tags, VERSION_TAG: version},
        description=f"One continuous worker of {names.application}. A manual run adds one "
        "worker. A terminated run releases its leases.",
    )
    def consume() -> None:
        work()

    return consume
