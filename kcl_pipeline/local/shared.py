"""One embedded AWS for all processes of a Dagster project on one machine.

Each process of Dagster imports the definitions: the code server, its successor after a reload, and
every run. The first one below `dagster dev` starts the server, as a process of its own; the others
find it by a file with its address and process id. The server ends with `dagster dev`.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil

from kcl_pipeline.clock import Clock, StopSignal, SystemClock
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.extras import require
from kcl_pipeline.signals import stop_on_signals
from kcl_pipeline.text import counted

START_SECONDS: Final = 90.0
_POLL_SECONDS: Final = 0.1
_CLOCK_SECONDS: Final = 5.0
"""The kernel's time of the boot, and so the creation time of a process, differs by up to a second
between two reads on a virtual machine. Nobody gets the id of a process within seconds of its start.
"""
_FILE: Final = "local-aws.json"
_NO_ACCOUNT: Final = frozenset(
    {
        "AWS_CA_BUNDLE",
        "AWS_EC2_METADATA_DISABLED",
        "AWS_MAX_ATTEMPTS",
        "AWS_PAGER",
        "AWS_RETRY_MODE",
        "AWS_SDK_LOAD_CONFIG",
    }
)
"""Variables that say how to call AWS, but not which account or endpoint."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs.

    Attributes:
        endpoint_url: Its address.
        pid: Its process.
        started: When the process was created, in epoch seconds. Another process may get its id.
        environment: The variables that direct AWS SDKs to it.
    """

    endpoint_url: str
    pid: int
    started: float
    environment: Mapping[str, str]

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return _runs(self.pid, self.started)


def use_local_aws(
    streams: Mapping[str, int],
    *,
    records: str | None = None,
    folder: str | os.PathLike[str] = ".run",
) -> str | None:
    """Use the embedded AWS in this process if no AWS account is configured.

    With a variable `AWS_*` that names an account, a region or an endpoint, it does nothing. Below
    `dagster dev` or `dg dev` it starts the server if none runs, and says so in one line on standard
    error. Elsewhere, as in `dg check defs` or a command line, it uses the server that runs.

    Args:
        streams: Streams to create, with their numbers of shards.
        records: A function as `module:function`, which the server calls once a second with the
            number of the call. It returns by stream the payloads to put. None: nothing is put.
        folder: Folder of the file by which processes find the server, and of its log.

    Returns:
        The address of the embedded AWS. None: this process uses another AWS, or none.

    Raises:
        SettingsError: The server did not start; the message names its log.

    Example:
        >>> use_local_aws({"orders": 4}, records="resources.samples:records")  # doctest: +SKIP
    """
    if _names_account():
        return None
    place, owner = Path(folder).resolve(), _dagster_dev()
    if owner is None:
        return find_local_aws(folder)
    place.mkdir(parents=True, exist_ok=True)
    with _alone(place):
        server = _running(place) or _started(place, owner, streams, records, SystemClock())
    os.environ.update(server.environment)
    return server.endpoint_url


def find_local_aws(folder: str | os.PathLike[str] = ".run") -> str | None:
    """Use the embedded AWS of `dagster dev` or of the demonstration, if one runs for this folder.

    Returns:
        Its address. None: an account is configured, or no server runs.
    """
    servers = map(_running, (Path(folder), Path(folder) / "demo"))
    server = None if _names_account() else next(filter(None, servers), None)
    if server is None:
        return None
    os.environ.update(server.environment)
    return server.endpoint_url


def record_server(
    folder: Path, pid: int, endpoint_url: str, environment: Mapping[str, str]
) -> Path:
    """Write the file by which other processes find a server. Returns its path."""
    server = Server(endpoint_url, pid, psutil.Process(pid).create_time(), environment)
    file = folder / _FILE
    partial = file.with_suffix(".new")
    partial.write_text(
        json.dumps({name: getattr(server, name) for name in Server.__slots__}), encoding="utf-8"
    )
    return partial.replace(file)


def _names_account() -> bool:
    return any(name.startswith("AWS_") and name not in _NO_ACCOUNT for name in os.environ)


def _created(pid: int) -> float | None:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process.create_time()
    except psutil.Error:
        return None


def _runs(pid: int, started: float | None) -> bool:
    """Whether the process with this id still is the one that was created at this time."""
    created = _created(pid)
    if created is None or started is None:
        return False
    return abs(created - started) < _CLOCK_SECONDS


def _dagster_dev() -> int | None:
    """The outermost `dagster dev` or `dg dev` above this process. None: there is none."""
    try:
        above = [*psutil.Process().parents(), psutil.Process()]
        found = [one.pid for one in above if _is_dev(one)]
    except psutil.Error:
        return None
    # From the nearest parent to the outermost one.
    return found[-1] if found else None


def _is_dev(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return any(
        Path(program).name in ("dagster", "dg") and command == "dev"
        for program, command in pairwise(words)
    )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of the folder, so that two processes do not start two servers."""
    with (folder / "local-aws.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _running(folder: Path) -> Server | None:
    """The server that the file names, if it runs."""
    try:
        server = Server(**json.loads((folder / _FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return server if server.is_alive else None


def _started(
    folder: Path, owner: int, streams: Mapping[str, int], records: str | None, clock: Clock
) -> Server:
    require("local", "the embedded AWS")
    (folder / _FILE).unlink(missing_ok=True)
    path = folder / "local-aws.log"
    command = [sys.executable, "-m", "kcl_pipeline.local.shared", str(folder), str(owner)]
    command += [f"--stream={name}:{shards}" for name, shards in streams.items()]
    command += [f"--records={records}"] if records else []
    with path.open("wb") as log:
        child = subprocess.Popen(  # noqa: S603 (this module)
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = clock.monotonic() + START_SECONDS
    while (server := _running(folder)) is None:
        if child.poll() is not None or clock.monotonic() > deadline:
            child.kill()
            raise SettingsError(
                f"the embedded AWS did not start; its log is {path}. Or set AWS_REGION and the "
                "credentials of an account"
            )
        clock.sleep(_POLL_SECONDS)
    shown = ", ".join(f"{name} ({counted(shards, 'shard')})" for name, shards in streams.items())
    sys.stderr.write(
        "kcl_pipeline: no AWS_* variable names an account, a region or an endpoint, so an embedded "
        f"AWS runs at {server.endpoint_url} "
        f"until this Dagster ends; streams: {shown}; "
        f"{'a publisher puts records' if records else 'nothing is put'}\n"
    )
    return server


def _serve(
    folder: Path, owner: int, streams: Mapping[str, int], records: str | None, stop: StopSignal
) -> None:
    """Serve until `stop` is set or the process `owner` has ended."""
    from kcl_pipeline.local.server import EmbeddedAws  # noqa: PLC0415 (moto is loaded only here)

    owner_began = _created(owner)
    with EmbeddedAws() as aws:
        import boto3  # noqa: PLC0415

        warm = threading.Thread(target=aws.warm_up, daemon=True)
        warm.start()
        kinesis = boto3.Session("local", "local", region_name=aws.region).client(
            "kinesis", endpoint_url=aws.endpoint_url
        )
        for name, shards in streams.items():
            kinesis.create_stream(StreamName=name, ShardCount=shards)
        warm.join()
        variables = {**aws.environment(), "AWS_EC2_METADATA_DISABLED": "true"}
        file = record_server(folder, os.getpid(), aws.endpoint_url, variables)
        publish = _function(records)
        number = 0
        try:
            while _runs(owner, owner_began):
                if publish is not None:
                    _put(kinesis, publish(number))
                number += 1
                if stop.wait(1.0):
                    break
        finally:
            file.unlink(missing_ok=True)


def _function(name: str | None) -> Any:
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    return getattr(importlib.import_module(module), attribute)


def _put(kinesis: Any, payloads: Mapping[str, Sequence[Any]]) -> None:
    for stream, found in payloads.items():
        records = [
            {
                "Data": one if isinstance(one, bytes) else json.dumps(one).encode(),
                "PartitionKey": str(number),
            }
            for number, one in enumerate(found)
        ]
        for first in range(0, len(records), 500):
            kinesis.put_records(StreamName=stream, Records=records[first : first + 500])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server: the command that `use_local_aws` starts."""
    parser = argparse.ArgumentParser(prog="python -m kcl_pipeline.local.shared")
    parser.add_argument("folder", type=Path)
    parser.add_argument("owner", type=int)
    parser.add_argument("--stream", action="append", default=[])
    parser.add_argument("--records")
    given = parser.parse_args(arguments)
    streams = {name: int(shards) for name, _, shards in (s.partition(":") for s in given.stream)}
    stop = SystemClock().signal()
    with stop_on_signals(stop):
        _serve(given.folder, given.owner, streams, given.records, stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
