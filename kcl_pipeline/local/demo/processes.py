"""The processes of the demonstration: the embedded AWS and `dagster dev`, each started here and
stopped by its own pid.
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


class StartFailed(KclError):  # noqa: N818 (a sentence for people)
    """A process of the demonstration did not come up; the message names its log."""


def free_port(wanted: int) -> int:
    """`wanted` if it is free on 127.0.0.1, else any free port."""
    for port in (wanted, 0):
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
    """Starts children in sessions of their own, so that a Ctrl-C in the terminal reaches them only
    through `stop_all`.
    """

    folder: Path
    clock: Clock
    environment: dict[str, str] = field(default_factory=dict)
    patience_seconds: float = 20.0
    """How long a child has to end in good order: its workers finish a batch, commit, and give their
    leases back.
    """
    _children: list[tuple[str, subprocess.Popen[bytes]]] = field(default_factory=list)

    def start(
        self, name: str, arguments: list[str], extra: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Run `python <arguments>`; its output is added to `<folder>/<name>.log`."""
        log = (self.folder / f"{name}.log").open("ab")
        with log:
            child = subprocess.Popen(  # noqa: S603 (our own modules)
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment, **(extra or {})},
                start_new_session=True,
            )
        self._children.append((name, child))
        return child

    def log_text(self, name: str) -> str:
        """What the process has printed so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def check(self) -> None:
        """Raise `StartFailed` when a child has ended by itself."""
        for name, child in self._children:
            if child.poll() is not None:
                tail = "\n".join(self.log_text(name).splitlines()[-15:])
                raise StartFailed(
                    f"{name} ended by itself with exit code {child.returncode}; its log ends "
                    f"with:\n{tail}"
                )

    def start_aws(self, port: int) -> str:
        """The embedded AWS; returns its address and puts it into the environment of everything
        started later.
        """
        self.start("aws", ["-m", "kcl_pipeline.local", "--port", str(port)])
        url = f"http://127.0.0.1:{port}"
        self._wait_for_port("aws", port, 60)
        self.environment |= {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "embedded",
            "AWS_SECRET_ACCESS_KEY": "embedded",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        return url

    def start_dagster(self, module: str, port: int) -> str:
        """`dagster dev` (webserver and daemon) for a module; returns the page's address, which
        answers.
        """
        self.launch_dagster(module, port)
        self._wait_for_port("dagster", port, 120)
        return f"http://127.0.0.1:{port}"

    def launch_dagster(self, module: str, port: int) -> subprocess.Popen[bytes]:
        """`dagster dev` without waiting for its page.

        Started again, it continues with the runs and sensors that are recorded in the folder.
        """
        home = self.folder / "dagster"
        home.mkdir(parents=True, exist_ok=True)
        write_dagster_yaml(home)
        self.environment["DAGSTER_HOME"] = str(home.resolve())
        return self.start(
            "dagster", ["-m", "dagster", "dev", "-m", module, "-h", "127.0.0.1", "-p", str(port)]
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
        """Stop every child and what it started: SIGINT first, SIGKILL for what is left after its
        time. What a child that ended by itself left, too.
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
            child.wait(10)
        self._children.clear()


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _left_by(pid: int) -> list[psutil.Process]:
    """What is left in the session of a child that has ended; nothing where its pid is somebody
    else's by now.
    """
    left = session_members(pid)
    return [] if any(process.pid == pid for process in left) else left


def session_members(session: int) -> list[psutil.Process]:
    """The processes of a session, youngest last."""
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
