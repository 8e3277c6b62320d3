"""Resolve the application of a command, and open its tables and streams."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kcl_pipeline.arguments import load_object
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import SettingsError

if TYPE_CHECKING:
    from kcl_pipeline.aws import AwsClients
    from kcl_pipeline.kinesis.client import KinesisClient
    from kcl_pipeline.leader.streams import SelectStreams
    from kcl_pipeline.leases.layout import Tables

NO_STREAM: Final = "-"
"""Placeholder for the streams of a command that only reads the tables."""

Application = Annotated[
    str | None,
    typer.Option(
        "--application",
        "-a",
        help="Name of the KCL application. The three tables are named after it.",
        show_default=False,
    ),
]
Streams = Annotated[
    list[str] | None,
    typer.Option(
        "--stream", "-s", help="Stream name or ARN; repeat per stream.", show_default=False
    ),
]
Pipeline = Annotated[
    str | None,
    typer.Option(
        "--pipeline",
        "-p",
        help="module:attribute of a KinesisPipeline, instead of --application and --stream.",
        show_default=False,
    ),
]
OnlyPipeline = Annotated[
    str | None,
    typer.Option(
        "--application",
        "-a",
        hidden=True,
        help="Refused with a sentence: the command needs the code of a pipeline.",
    ),
]
"""For commands whose `--pipeline` cannot be replaced by the name of the application."""
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON to standard output, other text to standard error")
]


@dataclass(frozen=True)
class Target:
    """One application. AWS is not called before the first use of a client."""

    settings: ConsumerSettings
    clock: Clock
    pipeline: object = None

    @property
    def names_streams(self) -> bool:
        """Whether the options name the streams."""
        return self.pipeline is not None or NO_STREAM not in self.settings.streams

    @cached_property
    def select(self) -> SelectStreams | None:
        """The function that selects the streams. None: the settings name them, or it is unknown."""
        from kcl_pipeline.pipeline import KinesisPipeline  # noqa: PLC0415 (AWS only here)
        from kcl_pipeline.pipeline.arguments import select_function  # noqa: PLC0415 (likewise)

        if not isinstance(self.pipeline, KinesisPipeline):
            return None
        return select_function(self.pipeline.streams, self.clients, self.clock)

    @cached_property
    def clients(self) -> AwsClients:
        """The boto3 clients, configured by the standard environment."""
        # Loaded here: only commands that call AWS need boto3.
        from kcl_pipeline.aws import AwsClients  # noqa: PLC0415

        return AwsClients(self.settings, clock=self.clock)

    @cached_property
    def tables(self) -> Tables:
        """The three tables."""
        from kcl_pipeline.aws import open_tables  # noqa: PLC0415 (likewise)

        return open_tables(self.settings, self.clients, self.clock)

    @cached_property
    def kinesis(self) -> KinesisClient:
        """The client for the streams."""
        from kcl_pipeline.aws import open_kinesis  # noqa: PLC0415 (likewise)

        return open_kinesis(self.settings, self.clients, self.clock)


def target(
    application: str | None,
    streams: list[str] | None,
    pipeline: str | None,
    *,
    needs_streams: bool = False,
) -> Target:
    """The application that the options name.

    Raises:
        SettingsError: The options contradict each other, or name no application.
        pydantic.ValidationError: A value is invalid.
    """
    if pipeline is not None:
        if application is not None or streams:
            raise SettingsError(
                f"--pipeline {pipeline} names application and streams; remove --application and "
                "--stream"
            )
        found = load_pipeline(pipeline)
        settings = getattr(found, "settings", None)
        if not isinstance(settings, ConsumerSettings):
            raise SettingsError(
                f"--pipeline {pipeline} is a {type(found).__name__}; name a KinesisPipeline"
            )
        return Target(settings, SystemClock(), found)
    if application is None:
        raise SettingsError(
            "--application is missing; write --application NAME, or --pipeline module:attribute"
        )
    if needs_streams and not streams:
        raise SettingsError(
            f"--stream is missing for --application {application!r}; write --stream NAME, once "
            "per stream"
        )
    from kcl_pipeline.local.shared import find_local_aws  # noqa: PLC0415 (only for a name)

    # A pipeline's module does the same by itself.
    if (url := find_local_aws()) is not None:
        typer.echo(f"this is the embedded AWS of this folder, at {url}", err=True)
    return Target(
        ConsumerSettings(application_name=application, streams=tuple(streams or [NO_STREAM])),
        SystemClock(),
    )


def load_pipeline(text: str) -> object:
    """Load a pipeline, see `load_named`."""
    return load_named("--pipeline", text)


def load_named(option: str, text: str) -> object:
    """Load the object at `module:attribute`. The current folder is on the module path.

    Raises:
        SettingsError: The object does not exist, or its module raises an error.
    """
    if os.getcwd() not in sys.path:  # noqa: PTH109 (an entry of sys.path is a string)
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 (likewise)
    return load_object(option, text)
