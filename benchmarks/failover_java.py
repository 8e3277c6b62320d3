"""Fleet of `benchmarks.failover` whose workers are those of the Java KCL, with default settings.

A commit is a checkpoint that a worker has stored after each batch. The KCL polls every 300 ms
here, so that its time between two polls does not count. It needs Maven, or jars that were fetched
before (`python -m tests.interop` keeps them in `.run/interop`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.failover_fleet import Commit, Commits, FailoverFleet
from kcl_pipeline.clock import Clock
from tests.interop.java import JavaKcl
from tests.interop.journal import JavaLog

FAMILY: Final = "3.5"
JAVA_LIMIT_SECONDS: Final = 300.0


class JavaCommits(Commits):
    """The checkpoints that Java workers report in their logs."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        super().__init__(folder, clock)
        self.logs: dict[str, JavaLog] = {}
        self._read_events = Counter[str]()

    def poll(self) -> None:
        """Read the lines that are new."""
        for worker, log in self.logs.items():
            log.poll(self._clock.monotonic())
            for event in log.events[self._read_events[worker] :]:
                if event.kind == "record":
                    self.ids[event.words[2]] += 1
                elif event.kind == "checkpoint":
                    self.all.append(Commit(event.at, event.lease, worker))
            self._read_events[worker] = len(log.events)


class JavaFleet(FailoverFleet):
    """See `FailoverFleet`. Its tables have the layout that the first worker has chosen."""

    def __init__(self, java: JavaKcl, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._java = java
        self._java_commits = JavaCommits(self._table, self.clock)
        self.commits = self._java_commits
        self.limit_seconds = JAVA_LIMIT_SECONDS

    def start(self, *names: str, environment: Mapping[str, str] | None = None) -> None:
        """See `FailoverFleet.start`."""
        for name in names:
            command = self._java.command(
                {
                    "application": self.name,
                    "streams": self.name,
                    "endpoint": self._processes.environment["AWS_ENDPOINT_URL"],
                    "worker": name,
                }
            )
            log = f"{self.name}-{name}"
            self.workers[name] = self._processes.start_program(log, command, environment)
            self._java_commits.logs[name] = JavaLog(self._processes.folder / f"{log}.log")

    def owners(self) -> dict[str, str | None]:
        """See `FailoverFleet`. The layout is looked up again until there are leases."""
        found = super().owners()
        if not found:
            self.open_tables()
            found = super().owners()
        return found

    def drain(self) -> tuple[int, int]:
        """Return no losses: a count of records is not the purpose, and Java repeats some."""
        self.publisher.stop()
        return 0, 0
