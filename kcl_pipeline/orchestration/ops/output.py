"""Define the output asset and the job of the workers.

Materializing the asset reads what is there now. A run of the job is one continuous worker.
"""

from collections.abc import Iterator

import dagster as dg

from kcl_pipeline.orchestration.assets.access import PipelineResources
from kcl_pipeline.orchestration.assets.contract import DagsterOptions, PipelineLike
from kcl_pipeline.orchestration.assets.names import CONTINUOUS, DRAIN, Names
from kcl_pipeline.orchestration.ops.consume import run_worker


def build_output_asset(
    pipeline: PipelineLike, names: Names, options: DagsterOptions, spec: dg.AssetSpec
) -> dg.AssetsDefinition:
    """The table. Its computation is one KCL worker that drains the streams."""

    @dg.multi_asset(
        name=names.output.to_python_identifier(),
        specs=[spec],
        required_resource_keys={names.aws, names.spark},
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


def build_consume_job(
    pipeline: PipelineLike, names: Names, options: DagsterOptions, version: str | None
) -> dg.JobDefinition:
    """The job that the leader sensor starts: one continuous worker.

    A plain op job, not a job of the output asset. As long as a run targets an asset, Dagster holds
    the asset to be in progress, and `AutomationCondition.eager()` of the assets downstream waits.

    The worker runs in the process of the run, so that it cannot outlive a killed run.
    """

    @dg.op(
        name=f"{names.prefix}_worker",
        required_resource_keys={names.aws, names.spark},
        pool=names.pool,
        description=f"One worker of `{names.application}`. It consumes until another worker has "
        "taken its leases, the run is terminated, or the application is paused.",
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
            version=version,
        )
        if landed is not None:
            context.log_event(dg.AssetMaterialization(names.output, metadata=landed))

    @dg.job(
        name=names.consume_job,
        executor_def=dg.in_process_executor,
        tags=names.worker_run_tags,
        description=f"One continuous worker of {names.application}. A manual run adds one "
        "worker. A terminated run releases its leases.",
    )
    def consume() -> None:
        work()

    return consume
