"""Run the embedded AWS in a separate process, and benchmarks of many processes on it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import boto3

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.local.demo.processes import Processes, free_port

ROOT: Final = Path(__file__).resolve().parent.parent


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


class ProcessBenchmark:
    """Processes of one benchmark, on one embedded AWS.

    Args:
        folder: Directory of the processes' files.
    """

    def __init__(self, folder: Path) -> None:
        self.clock = SystemClock()
        self._folder = folder
        self._processes = Processes(folder, self.clock)

    def start(self) -> None:
        """Start the embedded AWS."""
        self._processes.environment["PYTHONPATH"] = str(ROOT)
        self._kinesis = client(self._processes.start_aws(free_port(0)))

    def stop(self) -> None:
        """Stop all processes."""
        self._processes.stop_all()


@contextmanager
def working_folder(wanted: Path | None, prefix: str) -> Iterator[Path]:
    """Make a folder for a benchmark. Without a wanted one, it is deleted at the end.

    SIGTERM and SIGINT end the benchmark, so that its children are stopped before the end.
    """
    folder = wanted or Path(tempfile.mkdtemp(prefix=prefix))
    folder.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(130))
    try:
        yield folder.resolve()
    finally:
        if wanted is None:
            shutil.rmtree(folder, ignore_errors=True)
