"""What the jobs of an operator share: the application, the form and the result of a run."""

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import dagster as dg

from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.errors import KclError
from kcl_pipeline.orchestration.assets.access import PipelineResources
from kcl_pipeline.orchestration.assets.contract import PipelineLike
from kcl_pipeline.orchestration.assets.names import Names

C = TypeVar("C", bound=dg.Config)
Outcome = tuple[dict[str, Any], Sequence[str], bool]
"""The result as JSON, its sentences, and whether the operation is complete."""


def operation_job(
    pipeline: PipelineLike,
    names: Names,
    name: str,
    config: type[C],
    description: str,
    run: Callable[[ApplicationControl, C, PipelineResources], Outcome],
    clock: Clock | None = None,
    *,
    needs_spark: bool = False,
) -> dg.JobDefinition:
    """Build the job `<name>_<operation>` with a config form.

    The run fails with one sentence if the operation is refused or not complete. With `needs_spark`
    it has the resource with the Spark session, which is created at its first use.
    """

    def operate(context: dg.OpExecutionContext, config: C) -> None:
        found = PipelineResources(names, context)
        app = ApplicationControl(
            pipeline.settings,
            found.leases,
            found.workers,
            found.coordinator,
            clock or SystemClock(),
            f"Dagster run {context.run_id[:8]}",
        )
        try:
            result, sentences, is_complete = run(app, config, found)
        except KclError as error:
            raise dg.Failure(str(error), allow_retries=False) from error
        text = "\n".join(sentences)
        context.log.info(text)
        context.log_event(
            dg.AssetObservation(
                names.fleet,
                metadata={
                    "operation": name,
                    "outcome": dg.MetadataValue.text(text),
                    "result": dg.MetadataValue.json(json.loads(json.dumps(result))),
                },
            )
        )
        if not is_complete:
            raise dg.Failure(text, allow_retries=False)

    operate.__annotations__["config"] = config
    spark = {names.spark} if needs_spark else set()
    op = dg.op(
        name=f"{names.operator_job(name)}_op",
        description=description,
        required_resource_keys={
            names.aws,
            names.leases_resource,
            names.workers_resource,
            names.coordinator_resource,
            *spark,
        },
    )(operate)

    @dg.job(
        name=names.operator_job(name),
        executor_def=dg.in_process_executor,
        description=description,
        tags={"dagster/max_retries": "0"},
    )
    def job() -> None:
        op()

    return job
