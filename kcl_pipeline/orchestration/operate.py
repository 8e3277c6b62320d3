"""Define the job of an operator. It does what the commands of `kcl-pipeline do` do."""

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import dagster as dg
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from kcl_pipeline.aws import open_kinesis
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.control.context import Effect, OperationContext
from kcl_pipeline.control.operations import OPERATIONS, OperationRequest, ReplayRequest
from kcl_pipeline.errors import KclError
from kcl_pipeline.leases.application import ApplicationIdentity
from kcl_pipeline.orchestration.names import REPLAY_TAG, Names, PipelineResources
from kcl_pipeline.orchestration.options import PipelineLike
from kcl_pipeline.orchestration.worker_op import RunEvents
from kcl_pipeline.pipeline.output import identity_of_settings
from kcl_pipeline.settings_errors import settings_sentence
from kcl_pipeline.signals import stop_on_signals
from kcl_pipeline.worker_status import WorkerStatus

_SCALARS: Mapping[Any, Any] = {bool: dg.Bool, int: dg.Int, float: dg.Float}


def config_schema() -> dict[str, dg.Field]:
    """The config of the job: exactly one operation with its options."""
    shapes = {name: _shape(request) for name, request in OPERATIONS.items()}
    return {
        "operation": dg.Field(
            dg.Selector(shapes),  # type: ignore[no-untyped-call]
            description="One operation, such as `pause: {reason: a deploy}`",
        )
    }


def _shape(request: type[OperationRequest]) -> dg.Field:
    fields = {name: _field(info) for name, info in request.model_fields.items()}
    shape = dg.Shape(fields)  # type: ignore[no-untyped-call]
    return dg.Field(shape, is_required=False, description=request.__doc__)


def _field(info: FieldInfo) -> dg.Field:
    """The field of an option."""
    kinds = [one for one in typing.get_args(info.annotation) if one is not types.NoneType]
    is_optional = types.NoneType in typing.get_args(info.annotation)
    kind: Any = _SCALARS.get(kinds[0] if is_optional else info.annotation, dg.String)
    if typing.get_origin(info.annotation) is list:
        kind = dg.Array(dg.String)
    if is_optional:
        kind = dg.Noneable(kind)
    if info.is_required():
        return dg.Field(kind, description=info.description)
    return dg.Field(
        kind, is_required=False, default_value=info.default, description=info.description
    )


def build_operate_job(
    pipeline: PipelineLike, names: Names, clock: Clock | None = None
) -> dg.JobDefinition:
    """Build the job `<name>_operate`.

    The run fails with one sentence if the operation is refused or not complete.
    """

    def operate(context: dg.OpExecutionContext) -> None:
        ((name, options),) = context.op_config["operation"].items()
        try:
            operation = OPERATIONS[name](**options)
        except ValidationError as error:
            text = settings_sentence(error, OPERATIONS[name], {})
            raise dg.Failure(text, allow_retries=False) from error
        resources = PipelineResources(names, context)
        control = ApplicationControl(
            pipeline.settings,
            resources.leases,
            resources.workers,
            resources.coordinator,
            clock or SystemClock(),
            f"Dagster run {context.run_id[:8]}",
        )
        try:
            outcome = _run(pipeline, context, resources, control, operation)
        except KclError as error:
            raise dg.Failure(str(error), allow_retries=False) from error
        text = "\n".join(outcome.sentences)
        context.log.info(text)
        context.log_event(
            dg.AssetObservation(
                names.fleet,
                metadata={
                    "operation": name,
                    "outcome": dg.MetadataValue.text(text),
                    "result": dg.MetadataValue.json(json.loads(json.dumps(outcome.result))),
                },
            )
        )
        if not outcome.is_complete:
            raise dg.Failure(text, allow_retries=False)

    op = dg.op(
        name=f"{names.prefix}_operation",
        description=f"Changes {names.application}: one operation per run.",
        config_schema=config_schema(),
        required_resource_keys={
            *names.sessions,
            names.leases_resource,
            names.workers_resource,
            names.coordinator_resource,
        },
    )(operate)

    @dg.job(
        name=names.operate_job,
        executor_def=dg.in_process_executor,
        description=f"Pauses, resumes, drains, compacts, vacuums, seeks, replays or retires "
        f"{names.application}, as `kcl-pipeline do` does.",
        tags={"dagster/max_retries": "0"},
    )
    def job() -> None:
        op()

    return job


def _run(
    pipeline: PipelineLike,
    context: dg.OpExecutionContext,
    resources: PipelineResources,
    control: ApplicationControl,
    operation: OperationRequest,
) -> Effect:
    settings, clients = pipeline.settings, resources.aws.clients

    def progress(now: WorkerStatus) -> None:
        context.log.info(
            "%d records, %d rows in %.0f s; %d leases",
            now.totals.records,
            now.totals.rows,
            now.totals.seconds,
            len(now.positions),
        )

    def identity() -> ApplicationIdentity:
        kinesis = open_kinesis(settings, clients(settings), control.clock)
        return identity_of_settings(settings, kinesis, pipeline.sink)

    root, events = context.run.root_run_id or context.run_id, RunEvents()
    plain = OperationContext(
        lambda: control,
        clients,
        pipeline,
        identity,
        events=events,
        on_progress=progress,
        default_id=root[:8],  # a re-execution of the run continues its replay
        say=context.log.info,
    )
    if not isinstance(operation, ReplayRequest) or operation.dry_run:
        return operation.run(plain)
    # A replay ends in order when its run is terminated. Other operations end at once.
    stop = SystemClock().signal()
    with stop_on_signals(stop) as signals:
        session = resources.session_factory(signals)
        done = operation.run(replace(plain, stop=stop, session_factory=session))
    if text := events.drain():
        context.log.info(text)
    tags = {REPLAY_TAG: str(done.result["application"])}
    context.instance.add_run_tags(context.run_id, tags)
    if signals.received and not done.is_complete:
        raise dg.DagsterExecutionInterruptedError("\n".join(done.sentences))
    return done
