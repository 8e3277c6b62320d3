"""Which range each task has read, reported to the driver by the tasks themselves.

A DataFrame can be evaluated more than once: an executor is lost together with its shuffle files, a
straggler runs twice, a transform counts before it writes. The first task that reads a shard for a
job first reports where it stopped (it *pins* the range), and everybody after that reads exactly the
same range. Ends come back to the driver this way in the job itself.

The messages are lines of JSON. A connection begins with a `Hello`, which the server answers with an
`Answer` without a report or an error; then each `Request` has one `Answer`. The server is in
`pin_server`.
"""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass, field
from types import TracebackType
from typing import Annotated, Final, Self

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


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """What is pinned for the lease `key`; `report` pins it unless another task has."""

    job: _Name
    key: _Name
    report: str | None = None


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """What is pinned now, or why the request is refused."""

    report: str | None = None
    error: str | None = None


_ANSWER: Final = msgspec.json.Decoder(Answer)


@dataclass(frozen=True, slots=True)
class PinAddress:
    """Where a task reports to; it goes out with the job. `token` is in no log and no `repr`."""

    host: str
    port: int
    token: str = field(repr=False)


class Pins:
    """A task's side of one job; use it in `with`.

    Raises `SinkError` when the driver cannot be reached, or the job is over.
    """

    def __init__(self, address: PinAddress, job: str) -> None:
        self._address = address
        self._job = job
        clock = SystemClock()
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
            clock.sleep(random.SystemRandom().uniform(0, _RETRY_SECONDS))

    def get(self, lease_key: str) -> FetchedShard | None:
        """What was pinned for this shard; None: nobody has read it for this job."""
        return self._ask(lease_key, None)

    def pin(self, shard: FetchedShard) -> FetchedShard:
        """Pin what was read, or hear what another task has pinned before: that counts."""
        pinned = self._ask(shard.lease_key, shard)
        if pinned is None:
            raise SinkError(f"the driver did not keep the range of {shard.lease_key}")
        return pinned

    def _connect(self) -> None:
        address = self._address.host, self._address.port
        self._socket = socket.create_connection(address, CONNECT_SECONDS)
        self._lines = self._socket.makefile("rb")
        try:
            answer = self._exchange(Hello(self._address.token))
        except BaseException:
            self._close()
            raise
        if answer.error is not None:
            self._close()
            raise SinkError(f"the driver refuses a task: {answer.error}")

    def _exchange(self, message: Hello | Request) -> Answer:
        self._socket.sendall(msgspec.json.encode(message) + b"\n")
        line = self._lines.readline(MAX_LINE)
        if not line:
            raise ConnectionError("the driver has closed the connection")
        return _ANSWER.decode(line)

    def _ask(self, lease_key: str, shard: FetchedShard | None) -> FetchedShard | None:
        report = None if shard is None else FETCHED.dump_json(shard).decode()
        try:
            answer = self._exchange(Request(self._job, lease_key, report))
        except (OSError, msgspec.DecodeError) as error:
            raise SinkError(f"a task has lost the driver: {error}") from error
        if answer.error is not None:
            raise SinkError(f"the driver refuses the range of {lease_key}: {answer.error}")
        return None if answer.report is None else FETCHED.validate_json(answer.report)

    def _close(self) -> None:
        self._lines.close()
        self._socket.close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Hang up."""
        self._close()
