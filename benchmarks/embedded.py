"""Run the embedded AWS in a separate process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3


@contextmanager
def embedded_aws(stream: str, shards: int) -> Iterator[str]:
    """Run the embedded AWS with one stream in a separate process."""
    with subprocess.Popen(
        [sys.executable, "-m", "kcl_pipeline.local", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            client(url).create_stream(StreamName=stream, ShardCount=shards)
            yield url
        finally:
            process.terminate()


def client(url: str) -> Any:
    """Return a Kinesis client of the embedded AWS."""
    return boto3.client(
        "kinesis",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="k",
        aws_secret_access_key="s",
    )
