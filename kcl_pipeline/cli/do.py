"""`kcl-pipeline do OPERATION`: change an application. Options are the fields of the requests."""

from __future__ import annotations

import getpass
import inspect
import json
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic.fields import FieldInfo

from kcl_pipeline.cli import show
from kcl_pipeline.cli.exit_codes import FAILED
from kcl_pipeline.cli.failures import SentenceGroup
from kcl_pipeline.cli.target import (
    Application,
    AsJson,
    OnlyPipeline,
    Pipeline,
    Streams,
    Target,
    target,
)
from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.control.context import Effect, OperationContext
from kcl_pipeline.control.operations import (
    OPERATIONS,
    OperationRequest,
    ReplayRequest,
)
from kcl_pipeline.errors import SettingsError

if TYPE_CHECKING:
    from kcl_pipeline.leases.application import ApplicationIdentity

do = typer.Typer(
    cls=SentenceGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Change an application. The job <pipeline>_operate in the Dagster UI does the same.",
)


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """The option of a field."""
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    option = str(extra.get("option", f"--{name.replace('_', '-')}"))
    default = ... if field.is_required() else field.default
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is ... else default,
        annotation=Annotated[field.annotation, typer.Option(option, help=field.description)],
    )


def _command(name: str, request: type[OperationRequest]) -> Callable[..., None]:
    """The command of an operation: the options that name the application, and its fields."""
    kind = inspect.Parameter.KEYWORD_ONLY
    shared = {
        "application": OnlyPipeline if request.needs_pipeline else Application,
        "pipeline": Pipeline,
        **({} if request.needs_pipeline else {"stream": Streams}),
    }
    parameters = [
        *(_parameter(field, info) for field, info in request.model_fields.items()),
        *(inspect.Parameter(one, kind, default=None, annotation=a) for one, a in shared.items()),
        inspect.Parameter("as_json", kind, default=False, annotation=AsJson),
    ]

    def run(**given: Any) -> None:
        application, pipeline = given.pop("application"), given.pop("pipeline")
        streams, as_json = given.pop("stream", None), given.pop("as_json")
        if request.needs_pipeline and (application is not None or pipeline is None):
            raise SettingsError(
                f"`do {name}` needs the code of a pipeline; write --pipeline module:attribute, "
                "without --application"
            )
        operation = request(**given)
        app = target(application, streams, pipeline)
        report(_run(app, operation), as_json=as_json)

    run.__name__ = name
    run.__doc__ = inspect.getdoc(request)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


for _name, _request in OPERATIONS.items():
    do.command(_name)(_command(_name, _request))


def _run(app: Target, operation: OperationRequest) -> Effect:
    from kcl_pipeline.aws import AwsClients  # noqa: PLC0415 (AWS only here)

    context = OperationContext(
        lambda: operated(app),
        lambda settings: AwsClients(settings, clock=app.clock),
        app.pipeline,
        (lambda: identity_of(app)) if app.names_streams else None,
        say=lambda text: show.echo(text, err=True),
    )
    if isinstance(operation, ReplayRequest) and not operation.dry_run:
        from kcl_pipeline.cli.running import replaying  # noqa: PLC0415 (it needs the worker)

        with replaying(context) as running:
            return operation.run(running)
    return operation.run(context)


def operated(app: Target) -> ApplicationControl:
    """The application of a command, changed by the user of this process."""
    tables = app.tables
    return ApplicationControl(
        app.settings, tables.lease, tables.workers, tables.coordinator, app.clock, _user()
    )


def _user() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for the user id
        user = "user"
    return f"{user}@{socket.gethostname()}"


def identity_of(app: Target) -> ApplicationIdentity:
    """The streams and the sink that the options name."""
    from kcl_pipeline.pipeline.output import identity_of_settings  # noqa: PLC0415 (AWS only here)

    return identity_of_settings(app.settings, app.kinesis, getattr(app.pipeline, "sink", None))


def report(outcome: Effect, *, as_json: bool) -> None:
    """Print the outcome as JSON or as sentences. Exits with 1 unless it is complete."""
    if as_json:
        show.print_json(json.loads(json.dumps(outcome.result)))
    else:
        for sentence in outcome.sentences:
            show.echo(sentence)
    if not outcome.is_complete:
        raise typer.Exit(FAILED)
