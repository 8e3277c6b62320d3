"""Report a worker to the Dagster run that started it through a Pipes client.

A Pipes client of dagster-aws or dagster-k8s starts `kcl-pipeline worker` on ECS, EMR or Kubernetes,
and sets two variables of the environment: the context of the run, and where messages go.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dagster_pipes import (
    DAGSTER_PIPES_CONTEXT_ENV_VAR,
    DAGSTER_PIPES_MESSAGES_ENV_VAR,
    PipesDefaultMessageWriter,
    PipesMessageWriter,
    PipesS3MessageWriter,
    decode_param,
    open_dagster_pipes,
)

Report = Callable[[str, Mapping[str, object] | None], None]
"""Gets a line for the log of the run, and with the last line the summary of the worker."""


@contextmanager
def reporting() -> Iterator[Report | None]:
    """Yield what reports to the run. None: no Pipes client has started this process."""
    if DAGSTER_PIPES_CONTEXT_ENV_VAR not in os.environ:
        yield None
        return
    with open_dagster_pipes(message_writer=_writer()) as pipes:

        def report(line: str, summary: Mapping[str, object] | None = None) -> None:
            pipes.log.info(line)
            if summary is not None:
                pipes.report_custom_message(dict(summary))

        yield report


def _writer() -> PipesMessageWriter[Any]:
    """Return the writer for the place that the client reads: a bucket, a file or an output."""
    place = decode_param(os.environ[DAGSTER_PIPES_MESSAGES_ENV_VAR])
    if isinstance(place, dict) and "bucket" in place:
        import boto3  # noqa: PLC0415 (other places need no AWS)

        return PipesS3MessageWriter(client=boto3.client("s3"))
    return PipesDefaultMessageWriter()
