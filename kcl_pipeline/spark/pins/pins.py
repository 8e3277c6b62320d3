"""Report to the driver which range each task has read, so that repeated reads match.

A DataFrame can be evaluated more than once: an executor is lost with its shuffle files, a slow task
runs twice, or a transform counts before it writes. The first task that reads a shard in a job
reports its end position (it *pins* the range). All later tasks of the job read exactly this range.
The driver learns the end positions from these reports.

Messages are lines of JSON. A connection starts with a `Hello`, and the server responds with an
empty `Answer`. Each `PinRequest` then gets one `Answer`. The server is in `server`.
"""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
from pydantic import TypeAdapter

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.errors import SinkError
from kcl_pipeline.kinesis.ranges import FetchedShard

CONNECT_SECONDS: Final = 10.0
MAX_LINE: Final = 1024 * 1024
"""Bytes. A report has a few kilobytes."""
MAX_NAME: Final = 4096
"""Characters of a job's or lease's name."""
_ATTEMPTS: Final = 3
_RETRY_SECONDS: Final = 0.5
FETCHED: Final = TypeAdapter(FetchedShard)

_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class Hello(msgspec.Struct, forbid_unknown_fields=True):
    """The first message of a connection."""

    token: Annotated[str, msgspec.Meta(max_length=64)]


class PinRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Request the pinned range of the lease `key`; `report` pins it if no range is pinned yet."""

    job: _Name
    key: _Name
    report: str | None = None


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """The pinned range, or why the request was refused."""

    report: str | None = None
    error: str | None = None


_ANSWER: Final = msgspec.json.Decoder(Answer)


@dataclass(frozen=True, slots=True)
class PinAddress:
    """Address of the pin server, sent with the job. `token` is in no log and no `repr`."""

    host: str
    port: int
    token: str = field(repr=False)


class Pins:
    """A task's connection to the pin server for one job. Close it after use.

    Raises:
        SinkError: The driver cannot be reached, or the job has ended.
    """

    def __init__(self, address: PinAddress, job: str) -> None:
        self._address = address
        self._job = job
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._connect()
                return
            except (OSError, msgspec.DecodeError) as error:
                if attempt == _ATTEMPTS:
                    raise SinkError(
                        f"a task cannot reach the driver at {address.host}:{address.port}: "
                        f"{error}; see spark.driver.host and retrieval.executors_port"
                    ) from error
            SystemClock().sleep(random.SystemRandom().uniform(0, _RETRY_SECONDS))

    def get(self, lease_key: str) -> FetchedShard | None:
        """The pinned range of this shard; None if no task of this job has read it."""
        return self._ask(lease_key, None)

    def pin(self, shard: FetchedShard) -> FetchedShard:
        """Pin a range. Returns the pinned range, which another task may have pinned before."""
        pinned = self._ask(shard.lease_key, shard)
        if pinned is None:
            raise SinkError(f"the driver did not keep the range of {shard.lease_key}")
        return pinned

    def _connect(self) -> None:
        self._socket = socket.create_connection(
            (self._address.host, self._address.port), CONNECT_SECONDS
        )
        self._lines = self._socket.makefile("rb")
        try:
            answer = self._exchange(Hello(self._address.token))
        except BaseException:
            self.close()
            raise
        if answer.error is not None:
            self.close()
            raise SinkError(f"the driver refuses a task: {answer.error}")

    def _exchange(self, message: Hello | PinRequest) -> Answer:
        self._socket.sendall(msgspec.json.encode(message) + b"\n")
        line = self._lines.readline(MAX_LINE)
        if not line:
            raise ConnectionError("the driver has closed the connection")
        return _ANSWER.decode(line)

    def _ask(self, lease_key: str, shard: FetchedShard | None) -> FetchedShard | None:
        report = None if shard is None else FETCHED.dump_json(shard).decode()
        try:
            answer = self._exchange(PinRequest(self._job, lease_key, report))
        except (OSError, msgspec.DecodeError) as error:
            raise SinkError(f"a task lost its connection to the driver: {error}") from error
        if answer.error is not None:
            raise SinkError(f"the driver refuses the range of {lease_key}: {answer.error}")
        return None if answer.report is None else FETCHED.validate_json(answer.report)

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()
        self._socket.close()
