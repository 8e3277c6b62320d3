"""Follow a page with real processes, as a reader with several terminals does."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from kcl_pipeline.local.demo.processes import free_port
from tests.guides.snippets import ROOT, check_requirement
from tests.support.fleet_processes import wait_until

SECONDS = 300
BIN = Path(sys.executable).parent
PORT = "4566"
"""The port of the embedded AWS on the pages."""


class Walkthrough:
    """The reader's folder, variables and running commands.

    Attributes:
        url: Address of the Dagster UI, once it is started.
        output: What the last command printed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = self._logs = folder
        self.url = ""
        self.output = ""
        self._address = ""
        self._running: dict[str, subprocess.Popen[str]] = {}
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "DAGSTER_"))}
        self._environment = kept | {"PATH": path, "PYTHONPATH": str(ROOT)}
        self._environment |= {"AWS_EC2_METADATA_DISABLED": "true", "PYTHONUNBUFFERED": "1"}

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the page has set."""
        return {k: v for k, v in self._environment.items() if k.startswith(("AWS_", "DAGSTER_"))}

    def run(self, words: list[str]) -> None:
        """Run a command of the page. A command that installs something is only checked."""
        if words[0] == "export":
            self._export(*words[1].split("=", 1))
        elif words[0] == "cd":
            self.folder = self.folder / words[1]
        elif words[0] == "source" or words[1:3] == ["-m", "venv"]:
            assert words[-1] in (".venv", ".venv/bin/activate"), words
        elif words[:2] == ["pip", "install"]:
            check_requirement(words[2])
        elif words[:2] == ["kcl-pipeline", "local"]:
            self.start("local", self._command([*words, "--port", "0"]))
            self._address = self._first_line("local")
        elif words[:2] == ["dagster", "dev"]:
            port = free_port(0)
            self.url = f"http://127.0.0.1:{port}"
            self.start("dagster", self._command([*words, "-p", str(port)]))
        else:
            self._run(self._command(words))

    def start(self, name: str, command: list[str]) -> None:
        """Start a command that runs until `stop_all`."""
        with (self._logs / f"{name}.log").open("w") as log:
            self._running[name] = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def log(self, name: str) -> str:
        """What a started command has printed."""
        return (self._logs / f"{name}.log").read_text()

    def is_running(self, name: str) -> bool:
        """Whether a started command has not ended."""
        return self._running[name].poll() is None

    def stop_all(self) -> None:
        """Stop what was started, the last one first, with everything that it has started."""
        for child in reversed(list(self._running.values())):
            if child.poll() is None:
                child.terminate()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    def _export(self, name: str, value: str) -> None:
        if name == "AWS_ENDPOINT_URL":
            assert value == f"http://127.0.0.1:{PORT}"
            value = self._address
        elif name.startswith("AWS_"):  # the embedded AWS prints the same line
            assert f"export {name}={value}\n" in self.log("local")
        self._environment[name] = value.replace("$PWD", str(self.folder))

    def _command(self, words: list[str]) -> list[str]:
        if words[0] == "kcl-pipeline":
            return [sys.executable, "-m", "kcl_pipeline.cli", *words[1:]]
        found = shutil.which(words[0], path=self._environment["PATH"])
        assert found is not None, f"{words[0]} is not installed"
        return [found, *words[1:]]

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        self.output = done.stdout + done.stderr
        assert done.returncode == 0, f"{command}:\n{self.output[-6000:]}"

    def _first_line(self, name: str) -> str:
        found: list[str] = []

        def is_ready() -> bool:
            assert self.is_running(name), self.log(name)
            found[:] = re.findall(r"^http://127\.0\.0\.1:\d+$", self.log(name), re.MULTILINE)
            return bool(found) and "export AWS_ALLOW_HTTP=" in self.log(name)

        wait_until(is_ready, 60, f"{name} to print its address")
        return found[0]
