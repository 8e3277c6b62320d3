"""A worker id belongs to the process that started last."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil
import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.dynamodb import open_dynamodb
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.status.findings import Finding, findings_of
from kcl_pipeline.status.limits import CheckLimits
from kcl_pipeline.status.snapshot import read_snapshot
from tests.support.fleet_processes import CLOCK, Fleet, Publisher, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

ID_TAKEN = 4
SENTENCE = "another process has started under the worker id 'w-1'"
ONE = ("-p", "fleet:events", "--worker-id", "w-1")
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.fixture(params=[False])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    with EmbeddedAws() as aws:
        fleet = Fleet(aws, tmp_path, defaults=request.param)
        fleet.kinesis.create_stream(StreamName="events", ShardCount=3)
        try:
            yield fleet
        finally:
            fleet.close()


DEFAULTS = pytest.mark.parametrize("fleet", [True], ids=["default settings"], indirect=True)


def published(fleet: Fleet) -> Publisher:
    publisher = Publisher(fleet, per_second=200)
    publisher.start()
    return publisher


def wait_for_rows(fleet: Fleet, what: str, count: int = 200) -> float:
    """Wait for more rows; return the seconds until the first of them."""
    before, began = fleet.rows.count(), CLOCK.monotonic()
    wait_until(lambda: fleet.rows.count() > before, 90, what)
    seconds = CLOCK.monotonic() - began
    wait_until(lambda: fleet.rows.count() > before + count, 60, what)
    return seconds


def finish(fleet: Fleet, publisher: Publisher) -> None:
    comparison = publisher.finish()
    assert comparison.exact, f"{comparison}\n{fleet.logs()}"


def shared_ids(fleet: Fleet) -> list[Finding]:
    settings = ConsumerSettings(application_name="fleet", streams=("events",))
    tables = open_dynamodb(fleet.dynamodb, settings, CLOCK)
    findings = findings_of(read_snapshot(tables, settings, CLOCK), CheckLimits())
    return [one for one in findings if one.name == "worker_id_shared"]


def assert_finding(fleet: Fleet) -> None:
    """The finding names the id and both hosts, with which the run ids begin."""
    (finding,) = shared_ids(fleet)
    assert "w-1" in finding.sentence
    assert finding.sentence.count(f"{socket.gethostname()}:") == 2


def test_of_two_starts_one_goes_on_and_so_does_the_next_one_after_a_kill(fleet: Fleet) -> None:
    both = [fleet.spawn("w-1", *ONE) for _ in range(2)]
    fleet.workers = {str(one.pid): one for one in both}
    publisher = published(fleet)
    wait_until(lambda: any(one.poll() is not None for one in both), 90, "the end of one of them")
    ended, other = sorted(both, key=lambda one: one.poll() is None)
    assert ended.returncode == ID_TAKEN, fleet.logs()
    assert SENTENCE in fleet.logs()
    assert_finding(fleet)
    wait_for_rows(fleet, "the other one to go on")
    assert other.poll() is None, fleet.logs()
    fleet.end(str(other.pid), signal.SIGKILL)
    CLOCK.sleep(1)
    fleet.start("w-1")
    print(f"committed {wait_for_rows(fleet, 'the next one to go on'):.1f} s after its start")
    finish(fleet, publisher)
    assert fleet.end("w-1") == 0, fleet.logs()


@pytest.mark.long
@DEFAULTS
def test_of_two_starts_at_one_moment_one_lives_after_15_seconds(fleet: Fleet) -> None:
    both = [fleet.spawn("w-1", *ONE) for _ in range(2)]
    fleet.workers = {str(one.pid): one for one in both}
    publisher = published(fleet)
    wait_until(lambda: bool(fleet.owners()), 60, "the leases")
    CLOCK.sleep(15)
    assert sorted(str(one.poll()) for one in both) == [str(ID_TAKEN), "None"], fleet.logs()
    assert SENTENCE in fleet.logs()
    wait_for_rows(fleet, "the other one to go on")
    finish(fleet, publisher)


@pytest.mark.long
@pytest.mark.parametrize("fleet", [False, True], ids=["short times", "defaults"], indirect=True)
def test_a_process_whose_id_another_one_takes_ends_with_code_4_and_releases_nothing(
    fleet: Fleet,
) -> None:
    fleet.start("w-1")
    publisher = published(fleet)
    wait_for_rows(fleet, "the first rows")
    first = fleet.workers.pop("w-1")
    fleet.start("w-1")
    assert first.wait(60) == ID_TAKEN, fleet.logs()
    assert SENTENCE in fleet.logs()
    assert fleet.owners().keys() == {"w-1"}
    wait_for_rows(fleet, "the other process to go on")
    finish(fleet, publisher)
    assert_finding(fleet)
    assert fleet.end("w-1") == 0


@pytest.mark.long
@pytest.mark.parametrize("fleet", [False, True], ids=["short times", "defaults"], indirect=True)
@pytest.mark.parametrize("seconds", [0, 1])
def test_a_process_that_was_killed_is_started_again_under_its_id(
    fleet: Fleet, seconds: int
) -> None:
    fleet.start("w-1")
    publisher = published(fleet)
    wait_for_rows(fleet, "the first rows")
    for _ in range(3):
        fleet.end("w-1", signal.SIGKILL)
        CLOCK.sleep(seconds)
        fleet.start("w-1")
        after = wait_for_rows(fleet, "the next process to go on")
        print(f"committed {after:.1f} s after its start")
    finish(fleet, publisher)
    assert not shared_ids(fleet), "one process at a time had the id"
    assert fleet.end("w-1") == 0, fleet.logs()


class Supervisor(threading.Thread):
    """Starts a worker, and again whenever it has ended, unless with one of the codes `kept`."""

    def __init__(self, fleet: Fleet, log: str, kept: Collection[int]) -> None:
        super().__init__(daemon=True)
        self._fleet, self._log, self._kept = fleet, log, kept
        self._ends = threading.Event()
        self.codes: list[int] = []
        self.process = fleet.spawn(log, *ONE)

    def run(self) -> None:
        while True:
            code = self.process.wait()
            self.codes.append(code)
            if code in self._kept or self._ends.is_set():
                return
            self.process = self._fleet.spawn(self._log, *ONE)

    def end(self) -> None:
        """End the process, and start no further one."""
        self._ends.set()
        while self.is_alive():
            self.process.kill()
            self.join(1)


def supervised(fleet: Fleet, *logs: str, kept: Collection[int]) -> list[Supervisor]:
    started = [Supervisor(fleet, log, kept) for log in logs]
    for one in started:
        one.start()
    return started


@pytest.mark.long
def test_a_supervisor_restarts_a_worker_that_is_killed_at_once(fleet: Fleet) -> None:
    (supervisor,) = supervised(fleet, "s-1", kept=(0, ID_TAKEN))
    try:
        publisher = published(fleet)
        for _ in range(5):
            wait_for_rows(fleet, "the worker to go on")
            supervisor.process.kill()
        finish(fleet, publisher)
        supervisor.process.terminate()
        supervisor.join(30)
        assert supervisor.codes == [-signal.SIGKILL] * 5 + [0], fleet.logs()
    finally:
        supervisor.end()


@pytest.mark.long
def test_two_supervised_processes_with_one_id_lose_and_repeat_nothing(fleet: Fleet) -> None:
    both = supervised(fleet, "s-1", "s-2", kept=())
    try:
        publisher = published(fleet)
        wait_until(lambda: min(len(one.codes) for one in both) >= 3, 200, "three ends of each")
        assert {code for one in both for code in one.codes} == {ID_TAKEN}, fleet.logs()
        assert_finding(fleet)
        both[0].end()
        finish(fleet, publisher)
    finally:
        for one in both:
            one.end()


def has_namespaces() -> bool:
    if shutil.which(CONTAINER[0]) is None or os.geteuid() != 0:
        return False
    return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.long
@pytest.mark.skipif(not has_namespaces(), reason="a PID namespace needs unshare, and root")
def test_a_container_that_is_started_again_takes_its_leases_back(fleet: Fleet) -> None:
    """Its process has the pid 1 again, and its host name stays: so does its default worker id."""

    def start() -> subprocess.Popen[bytes]:
        return fleet.spawn("container", "-p", "fleet:events", inside=CONTAINER)

    (worker_id,) = {f"{socket.gethostname().replace('-', '_')}-1"}
    first = fleet.workers["container"] = start()
    publisher = published(fleet)
    wait_for_rows(fleet, "the first rows")
    assert fleet.owners().keys() == {worker_id}, fleet.logs()
    first.kill()
    first.wait(10)
    CLOCK.sleep(1)
    second = fleet.workers["container"] = start()
    print(f"committed {wait_for_rows(fleet, 'the next container to go on'):.1f} s after its start")
    assert fleet.owners().keys() == {worker_id}, fleet.logs()
    finish(fleet, publisher)
    (process,) = psutil.Process(second.pid).children()
    process.terminate()
    assert second.wait(30) == 0, fleet.logs()
    assert not fleet.owners().keys() - {"nobody"}
