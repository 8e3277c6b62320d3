"""Which application a command is about, and the way to its tables and stream."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import SettingsError

if TYPE_CHECKING:
    from kcl_pipeline.aws import AwsClients, Tables
    from kcl_pipeline.kinesis.client import KinesisClient

NO_STREAM: Final = "-"
"""Stands for the streams of a command that only looks at the tables."""

Application = Annotated[
    str | None,
    typer.Option(
        "--application",
        "-a",
        help="Name of the KCL application: it names the three tables.",
        show_default=False,
    ),
]
Streams = Annotated[
    list[str] | None,
    typer.Option("--stream", "-s", help="Stream name or ARN; once per stream.", show_default=False),
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
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@dataclass(frozen=True)
class Target:
    """One application. Nothing is asked of AWS before the first use of what is opened here."""

    settings: ConsumerSettings
    clock: Clock

    @cached_property
    def clients(self) -> AwsClients:
        """The boto3 clients, by the standard environment."""
        # boto3 is loaded only by commands that ask AWS
        from kcl_pipeline.aws import AwsClients  # noqa: PLC0415

        return AwsClients(self.settings, clock=self.clock)

    @cached_property
    def tables(self) -> Tables:
        """The three tables."""
        from kcl_pipeline.aws import open_tables  # noqa: PLC0415 (likewise)

        return open_tables(self.settings, self.clients, self.clock)

    @cached_property
    def kinesis(self) -> KinesisClient:
        """The stream client."""
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

    Raises `SettingsError` or pydantic's `ValidationError`, both with what to write instead.
    """
    if pipeline is not None:
        if application is not None or streams:
            raise SettingsError(
                f"--pipeline {pipeline} says everything; leave --application and --stream out"
            )
        return Target(load_pipeline_settings(pipeline), SystemClock())
    if application is None:
        raise SettingsError(
            "no application is named; write --application NAME, or --pipeline module:attribute"
        )
    if needs_streams and not streams:
        raise SettingsError(
            f"no stream of {application!r} is named; write --stream NAME, once per stream"
        )
    return Target(
        ConsumerSettings(application_name=application, streams=tuple(streams or [NO_STREAM])),
        SystemClock(),
    )


def load_pipeline_settings(text: str) -> ConsumerSettings:
    """The settings of the pipeline at `module:attribute`. Raises `SettingsError`."""
    found = load_pipeline(text)
    settings = getattr(found, "settings", None)
    if not isinstance(settings, ConsumerSettings):
        raise SettingsError(
            f"--pipeline {text} is a {type(found).__name__}; name a KinesisPipeline"
        )
    return settings


def load_pipeline(text: str) -> object:
    """The object at `module:attribute`; modules are looked for in the current folder too.

    Raises `SettingsError`.
    """
    module_name, colon, attribute = text.partition(":")
    if not (module_name and colon and attribute):
        raise SettingsError(
            f"--pipeline {text!r} is not module:attribute; write for example "
            "my_project.orders:pipeline"
        )
    if os.getcwd() not in sys.path:  # noqa: PTH109 (an entry of sys.path is a text)
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 (likewise)
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"--pipeline {text}: there is no module {error.name!r} in this folder or on PYTHONPATH"
        ) from error
    except SettingsError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise SettingsError(
            f"--pipeline {text}: {module_name} fails with {type(error).__name__}: {error} "
            f"({frame.filename}:{frame.lineno})"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise SettingsError(f"--pipeline {text}: {module_name} has no {attribute!r}")
        found = getattr(found, part)
    return found
