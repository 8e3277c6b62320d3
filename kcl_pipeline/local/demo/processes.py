"""Processes of the demonstration: the embedded AWS and `dagster dev`.

Each process is started here and stopped by its process id.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import KclError
from kcl_pipeline.local.dagster_yaml import write_dagster_yaml
from kcl_pipeline.local.no_proxy import no_proxy_variables
from kcl_pipeline.local.shared import record_server


class StartFailed(KclError):  # noqa: N818 (a sentence for people)
    """A process of the demonstration did not start or ended early; the message gives details."""


def free_port(preferred: int) -> int:
    """Return `preferred` if that port of 127.0.0.1 is free, else any free port.

    Raises:
        StartFailed: No port is free.
    """
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise StartFailed("no free port on 127.0.0.1")


@dataclass
class Processes:
    """Child processes of the demonstration.

    Every child has its own session. A Ctrl-C in the terminal therefore reaches it only through
    `stop_all`.

    Attributes:
        folder: Directory of logs and of the Dagster instance.
        clock: Clock for time limits.
        environment: Variables that are added to the environment of every child.
        patience_seconds: Time limit of a graceful stop.
    """

    folder: Path
    clock: Clock
    environment: dict[str, str] = field(default_factory=dict)
    patience_seconds: float = 20.0
    """Seconds that a child has to stop gracefully.

    Its workers finish a batch, commit it and release their leases in this time.
    """
    _children: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list)

    def start(
        self, name: str, arguments: list[str], extra: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Run `python <arguments>` and append its output to `<folder>/<name>.log`."""
        return self.start_program(name, [sys.executable, *arguments], extra)

    def start_program(
        self, name: str, command: list[str], extra: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Run a command and append its output to `<folder>/<name>.log`."""
        log = (self.folder / f"{name}.log").open("ab")
        with log:
            child = subprocess.Popen(  # noqa: S603 (programs of the demonstration and the tests)
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment, **(extra or {})},
                start_new_session=True,
            )
        self._children.append((name, child))
        return child

    def log_text(self, name: str) -> str:
        """Return the output of a process so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def check(self) -> None:
        """Check that all children are running.

        Raises:
            StartFailed: A child ended without a call of `stop_all`.
        """
        for name, child in self._children:
            if child.poll() is not None:
                tail = "\n".join(self.log_text(name).splitlines()[-15:])
                raise StartFailed(
                    f"{name} ended by itself with exit code {child.returncode}; its log ends "
                    f"with:\n{tail}"
                )

    def start_aws(self, port: int) -> str:
        """Start the embedded AWS and return its address.

        The environment of all processes that start later contains the address and credentials, and
        so does a file in the folder.
        """
        server = self.start("aws", ["-m", "kcl_pipeline.local", "--port", str(port)])
        url = f"http://127.0.0.1:{port}"
        self._wait_for_port("aws", port, 60)
        variables = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "embedded",
            "AWS_SECRET_ACCESS_KEY": "embedded",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            **no_proxy_variables(os.environ),
        }
        record_server(self.folder, server.pid, url, variables)
        self.environment |= variables
        return url

    def start_dagster(self, module: str | None, port: int) -> str:
        """Start `dagster dev` and return the address of the Dagster UI.

        `dagster dev` runs the webserver and the daemon. The method returns when the webserver
        accepts connections.

        Args:
            module: The module to load. None: the workspace of the current folder.
            port: Port of the Dagster UI.
        """
        self.launch_dagster(module, port)
        self._wait_for_port("dagster", port, 120)
        return f"http://127.0.0.1:{port}"

    def launch_dagster(self, module: str | None, port: int) -> subprocess.Popen[bytes]:
        """Start `dagster dev` and return without waiting for the webserver.

        After a restart, Dagster continues with the runs and sensors recorded in the directory.
        """
        home = self.folder / "dagster"
        home.mkdir(parents=True, exist_ok=True)
        write_dagster_yaml(home)
        self.environment["DAGSTER_HOME"] = str(home.resolve())
        chosen = [] if module is None else ["-m", module]
        return self.start(
            "dagster", ["-m", "dagster", "dev", *chosen, "-h", "127.0.0.1", "-p", str(port)]
        )

    def _wait_for_port(self, name: str, port: int, seconds: float) -> None:
        deadline = self.clock.monotonic() + seconds
        while self.clock.monotonic() < deadline:
            self.check()
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            self.clock.sleep(0.2)
        raise StartFailed(
            f"{name} did not listen on 127.0.0.1:{port} within {seconds:.0f} s; see "
            f"{self.folder / (name + '.log')}"
        )

    def stop_all(self) -> None:
        """Stop every child and its descendants.

        `dagster dev` gets SIGTERM and other children get SIGINT. After `patience_seconds`, the
        remaining processes get SIGTERM, and five seconds later SIGKILL. If a child has already
        ended, the processes that are left in its session are stopped too.
        """
        for _, child in reversed(self._children):
            if child.poll() is None:
                family = _family(child.pid)
                is_dagster = child.args[2:3] == ["dagster"]  # type: ignore[index]
                child.send_signal(signal.SIGTERM if is_dagster else signal.SIGINT)
            else:
                family = _left_by(child.pid)
                for process in family:
                    _send(process, signal.SIGTERM)
            _, alive = psutil.wait_procs(family, timeout=self.patience_seconds)
            for process in alive:
                _send(process, signal.SIGTERM)
            _, alive = psutil.wait_procs(alive, timeout=5)
            for process in alive:
                _send(process, signal.SIGKILL)
            psutil.wait_procs(alive, timeout=10)
            child.wait(10)
        self._children.clear()


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _left_by(pid: int) -> list[psutil.Process]:
    """Return the remaining processes in the session of a child that has ended.

    The list is empty when a new process uses the child's id.
    """
    left = session_members(pid)
    return [] if any(process.pid == pid for process in left) else left


def session_members(session: int) -> list[psutil.Process]:
    """Return the processes of a session in the order of their process ids."""
    members = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):  # it has ended since it was listed
            if os.getsid(process.pid) == session:
                members.append(process)
    return members


def _send(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
