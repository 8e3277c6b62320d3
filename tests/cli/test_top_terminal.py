"""`kcl-pipeline top` in a pseudo terminal: keys, and the terminal at the end."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest_plugins = ["tests.support.cli_fixtures"]
pytestmark = [pytest.mark.usefixtures("environment"), pytest.mark.processes]

ROOT = Path(__file__).parents[2]
ALTERNATE_SCREEN, MAIN_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
SECONDS = 60
FAILING = """
import sys
from kcl_pipeline.cli import app
from kcl_pipeline.cli.top import command
command.Refresher.run = lambda self: setattr(self, "_defect", ZeroDivisionError("a defect"))
app(sys.argv[1:])
"""


class Page:
    """The command in a pseudo terminal of 30 lines and 120 columns."""

    def __init__(self, *command: str) -> None:
        self.main, self.terminal = pty.openpty()
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
        self.before = termios.tcgetattr(self.terminal)
        self.output = b""
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=self.terminal,
            stdout=self.terminal,
            stderr=self.terminal,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"},
            start_new_session=True,
        )

    def wait_for(self, *texts: bytes) -> None:
        """Wait until the page has printed the texts, one after the other."""
        start, end = 0, time.monotonic() + SECONDS
        for text in texts:
            while (found := self.output.find(text, start)) < 0:
                assert time.monotonic() < end, (text, self.output[-3000:])
                assert self.process.poll() is None or self.read(), (text, self.output[-3000:])
                self.read()
            start = found + len(text)
        self.output = self.output[start:]

    def read(self, seconds: float = 0.1) -> bytes:
        """Take what the page has printed."""
        data = b""
        if select.select([self.main], [], [], seconds)[0]:
            with suppress(OSError):
                data = os.read(self.main, 65_536)
        self.output += data
        return data

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    def end(self) -> int:
        """Wait for the end. Returns the exit code."""
        end = time.monotonic() + SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < end, self.output[-3000:]
            self.read()
        while self.read():
            pass
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        for fd in (self.main, self.terminal):
            with suppress(OSError):
                os.close(fd)

    @property
    def is_restored(self) -> bool:
        return (
            termios.tcgetattr(self.terminal) == self.before
            and self.output.rfind(SHOW_CURSOR) > self.output.rfind(HIDE_CURSOR)
            and self.output.rfind(MAIN_SCREEN) > self.output.rfind(ALTERNATE_SCREEN)
        )


@pytest.fixture
def start():
    pages = []

    def begin(*command: str) -> Page:
        pages.append(Page(*command))
        return pages[-1]

    yield begin
    for page in pages:
        page.close()


def top(name: str) -> list[str]:
    return ["-m", "kcl_pipeline.cli", "top", "-a", name, "--interval-seconds", "0.5"]


def test_keys_sort_filter_and_quit(start, fleet):
    page = start(*top(fleet.name))
    page.wait_for(b"sorted by lag")
    page.type("w")
    page.wait_for(b"sorted by worker")
    page.type("/" + fleet.keys[2][-3:])
    page.wait_for(b"filter: " + fleet.keys[2][-3:].encode())
    page.type("q")  # part of the filter
    page.wait_for(b"Leases: 0")
    page.type("\x1b")
    page.wait_for(b"Leases: 4", b"sorted by worker")
    lease = fleet.tables.lease.get(fleet.keys[3])
    assert fleet.tables.lease.assign(lease, "blue-1")
    page.wait_for(b"Moves: 1", b"assigned")
    page.type("q")
    assert page.end() == 0
    assert page.is_restored


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_the_terminal(number, start, shared):
    page = start(*top(shared.name))
    page.wait_for(b"sorted by lag")
    page.process.send_signal(number)
    assert page.end() == 0
    assert page.is_restored


def test_control_c_restores_the_terminal(start, shared):
    page = start(*top(shared.name))
    page.wait_for(b"sorted by lag")
    page.type("\x03")
    assert page.end() == 0
    assert page.is_restored


def test_a_defect_restores_the_terminal(start, shared):
    page = start("-c", FAILING, "top", "-a", shared.name)
    assert page.end() == 1
    assert page.is_restored
    shown = page.output
    assert shown.index(MAIN_SCREEN) < shown.index(b"ZeroDivisionError: a defect")


def test_a_table_that_cannot_be_read_is_shown_and_read_again(start, fleet, server):
    page = start(*top(fleet.name))
    page.wait_for(b"sorted by lag")
    fleet.clients.dynamodb.delete_table(TableName=fleet.settings.coordinator_state_table_name)
    page.wait_for(b"not refreshed: ")
    fleet.tables.coordinator.ensure_exists()
    page.wait_for(b"no leader: there is no lock")
    page.type("q")
    assert page.end() == 0
    assert page.is_restored
