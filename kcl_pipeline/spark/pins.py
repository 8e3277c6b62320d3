"""The driver's memory of which range each task has read, asked by the tasks themselves.

A DataFrame can be evaluated more than once: an executor is lost together with its shuffle files, a straggler runs twice, a transform counts before it
writes. Whoever reads a shard for a job first says where it stopped, and everybody after that reads exactly the same range. Ends come back to the
driver this way in the job itself.

The server listens where Spark's driver does, and answers only those who know the token that went out with the job.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import socketserver
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from pydantic import TypeAdapter

from kcl_pipeline.errors import SinkError
from kcl_pipeline.records.ranges import FetchedShard

CONNECT_SECONDS: Final = 10.0
IDLE_SECONDS: Final = 600.0
_MAX_LINE: Final = 1 << 20
_FETCHED: Final = TypeAdapter(FetchedShard)


@dataclass(frozen=True, slots=True)
class PinAddress:
    """Where a task asks; it goes out with the job. `token` is in no log."""

    host: str
    port: int
    token: str


class PinServer:
    """Serves the pins of one driver until `close`. `bind_host` is listened on, `host` is what tasks connect to; `port` 0: any free one.

    Raises `SinkError` when the address cannot be listened on.
    """

    def __init__(self, bind_host: str, host: str, port: int = 0) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, dict[str, str]] = {}
        # Not from a seeded generator: what can be guessed protects nothing
        self._token = secrets.token_hex(16)
        try:
            self._server = _Server((bind_host, port), _Handler)
        except OSError as error:
            raise SinkError(f"the driver cannot listen on {bind_host}:{port} for its tasks: {error}; see spark.driver.bindAddress") from error
        self._server.pins = self
        self.address = PinAddress(host, self._server.server_address[1], self._token)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="pins", daemon=True)
        self._thread.start()

    def begin(self, job: str) -> None:
        """Take pins for this job."""
        with self._lock:
            self._jobs[job] = {}

    def end(self, job: str) -> tuple[FetchedShard, ...]:
        """What was pinned, by lease key; the job's tasks are refused from now on."""
        with self._lock:
            pinned = self._jobs.pop(job, {})
        return tuple(_FETCHED.validate_json(pinned[key]) for key in sorted(pinned))

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CONNECT_SECONDS)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The pin of a shard, which is the report that comes with the request unless there was one before."""
        if not hmac.compare_digest(str(request.get("token")), self._token):
            return {"error": "the token is wrong"}
        key, report = str(request.get("key")), request.get("report")
        with self._lock:
            job = self._jobs.get(str(request.get("job")))
            if job is None:
                return {"error": "the job is over"}
            if report is not None:
                report = job.setdefault(key, str(report))
            return {"report": job.get(key)}


class Pins:
    """A task's side of one job; use it in `with`. Raises `SinkError` when the driver cannot be reached, or the job is over."""

    def __init__(self, address: PinAddress, job: str) -> None:
        self._address = address
        self._job = job
        try:
            self._socket = socket.create_connection((address.host, address.port), CONNECT_SECONDS)
        except OSError as error:
            where = f"{address.host}:{address.port}"
            raise SinkError(f"a task cannot reach the driver at {where}: {error}; see spark.driver.host and retrieval.executors_port") from error
        self._lines = self._socket.makefile("rb")

    def get(self, lease_key: str) -> FetchedShard | None:
        """What was pinned for this shard; None: nobody has read it for this job."""
        return self._ask(lease_key, None)

    def pin(self, shard: FetchedShard) -> FetchedShard:
        """Pin what was read, or hear what another task has pinned before: that counts."""
        pinned = self._ask(shard.lease_key, shard)
        if pinned is None:
            raise SinkError(f"the driver did not keep the range of {shard.lease_key}")
        return pinned

    def _ask(self, lease_key: str, shard: FetchedShard | None) -> FetchedShard | None:
        report = None if shard is None else _FETCHED.dump_json(shard).decode()
        request = {"token": self._address.token, "job": self._job, "key": lease_key, "report": report}
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(self._lines.readline(_MAX_LINE))
        except (OSError, ValueError) as error:
            raise SinkError(f"a task has lost the driver: {error}") from error
        if "error" in answer:
            raise SinkError(f"the driver refuses the range of {lease_key}: {answer['error']}")
        return None if answer["report"] is None else _FETCHED.validate_json(answer["report"])

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Hang up."""
        self._lines.close()
        self._socket.close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    pins: PinServer


class _Handler(socketserver.StreamRequestHandler):
    timeout = IDLE_SECONDS
    server: _Server

    def handle(self) -> None:
        try:
            while line := self.rfile.readline(_MAX_LINE):
                self.wfile.write(json.dumps(self.server.pins.answer(json.loads(line))).encode() + b"\n")
        except (OSError, ValueError):
            return
