"""`kcl-pipeline local`: run the embedded AWS until Ctrl-C."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.target import AsJson
from kcl_pipeline.clock import StopSignal, SystemClock
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.signals import stop_on_signals

if TYPE_CHECKING:
    from kcl_pipeline.local import EmbeddedAws
    from kcl_pipeline.local.faults import FaultRule

DEFAULT_PORT: Final = 4566
_WAIT_SECONDS: Final = 3_600.0
_FAULT_HELP: Final = (
    "A fault as SERVICE.OPERATION:KIND=VALUE, for example dynamodb.Scan:throttle=0.5 or "
    "kinesis:delay=0.2. KIND is throttle, error500, deny, drop_before, drop_after or delay. VALUE "
    "is the share of calls from 0 to 1, or for delay the seconds."
)


def local(
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65_535, help="Port on 127.0.0.1; 0 chooses a free port."),
    ] = DEFAULT_PORT,
    region: Annotated[
        str, typer.Option("--region", help="Region name of the embedded AWS.")
    ] = "us-east-1",
    enforce_limits: Annotated[
        bool, typer.Option("--enforce-limits", help="Throttle shards as Kinesis does.")
    ] = False,
    create: Annotated[
        list[str] | None,
        typer.Option(
            "--create",
            help="A stream to create at the start: NAME or NAME:SHARDS.",
            show_default=False,
        ),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option("--fault", metavar="RULE", help=_FAULT_HELP, show_default=False),
    ] = None,
    reshard_delay_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds for which a stream is UPDATING after a reshard.")
    ] = 0.0,
    create_delay_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds for which a new stream is CREATING.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Run Kinesis and DynamoDB in memory on 127.0.0.1 until Ctrl-C.

    The only line on standard output is the address, or with --json the address, the variables and
    the streams. It is printed when the server is ready.
    """
    streams = [parse_stream(text) for text in create or []]
    from kcl_pipeline.local import EmbeddedAws  # noqa: PLC0415 (moto is loaded only here)
    from kcl_pipeline.local.fault_text import parse_fault  # noqa: PLC0415 (likewise)
    from kcl_pipeline.testing.kinesis.state import KinesisSettings  # noqa: PLC0415 (likewise)

    rules = [parse_fault(text) for text in fault or []]
    settings = KinesisSettings(
        region=region,
        enforce_limits=enforce_limits,
        create_delay_seconds=create_delay_seconds,
        reshard_delay_seconds=reshard_delay_seconds,
    )
    stop = SystemClock().signal()
    aws = EmbeddedAws(port=port, region=region, settings=settings)
    with stop_on_signals(stop):
        try:
            aws.start()
        except OSError as error:
            raise SettingsError(
                f"--port {port}: cannot listen on 127.0.0.1: {error.strerror or error}; choose "
                "another port, or 0 for a free one"
            ) from error
        try:
            serve(aws, streams, stop, rules, as_json=as_json)
        finally:
            aws.stop()


def serve(
    aws: EmbeddedAws,
    streams: list[tuple[str, int]],
    stop: StopSignal,
    rules: Sequence[FaultRule] = (),
    *,
    as_json: bool = False,
) -> None:
    """Create the streams, print the address and the environment, and wait for `stop`.

    The faults begin when the streams exist.
    """
    aws.warm_up()
    for name, shards in streams:
        create_stream(aws, name, shards)
    aws.fault_rules.replace(list(rules))
    if as_json:
        show.print_json_line(
            {
                "endpoint_url": aws.endpoint_url,
                "region": aws.region,
                "environment": aws.environment(),
                "streams": dict(streams),
            }
        )
    else:
        typer.echo(aws.endpoint_url)
    for name, value in aws.environment().items():
        typer.echo(f"export {name}={shlex.quote(value)}", err=True)
    while not stop.wait(_WAIT_SECONDS):
        pass


def create_stream(aws: EmbeddedAws, name: str, shards: int) -> None:
    """Create one stream with the server's API."""
    # loaded only when there is a stream to create
    import boto3  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415

    client = boto3.Session("local", "local", region_name=aws.region).client(
        "kinesis", endpoint_url=aws.endpoint_url, config=Config(proxies={})
    )
    try:
        client.create_stream(StreamName=name, ShardCount=shards)
    finally:
        client.close()


def parse_stream(text: str) -> tuple[str, int]:
    """Parse "NAME" or "NAME:SHARDS" into a name and a number of shards.

    Raises:
        SettingsError: The text has neither form.
    """
    name, colon, shards = text.partition(":")
    if not name or (colon and not (shards.isascii() and shards.isdigit() and int(shards) > 0)):
        raise SettingsError(
            f"--create {text!r} is neither NAME nor NAME:SHARDS; write for example orders:8"
        )
    return name, int(shards or 1)
