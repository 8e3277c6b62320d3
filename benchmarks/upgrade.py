"""Upgrade of a running application: workers of an older revision are replaced under load.

Three worker processes of the older revision consume 8 shards of the embedded AWS, 5 records per
second each. Each stage replaces the three workers, one after the other, gracefully or by SIGKILL,
while records flow:

1. by workers of this revision with default settings, which keep the commit protocol of the record;
2. by workers with `commit_protocol="positions"`, which change the record;
3. by workers with default settings.

    python -m benchmarks.upgrade --from REVISION [--seed 1] [--json]

A worker that ends by itself is started again, as a supervisor does: a running worker ends when it
takes a lease after the record was changed. At the end the output is counted, and an older worker is
started again. It must be refused if the older revision does not know the commit protocol.

The last line of the output is JSON: `from`, `sent`, `missing`, `duplicated`, `kills`, `restarts`
(of workers that ended by themselves), `protocol` (of the record at the end), `older_worker`
(`refused` or `joined`) and `settled_s`, the seconds that each replacement took until all shards
were committed by their workers. The exit code is 1 if a
record is missing or duplicated.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.embedded import ProcessBenchmark, working_folder
from benchmarks.failover import NORMAL_BYTES, summary
from benchmarks.failover_fleet import FailoverFleet, TimedOutError

WORKERS: Final = 3
ROOT: Final = Path(__file__).parent.parent
POSITIONS: Final = {"FAILOVER_SETTINGS": json.dumps({"batch": {"commit_protocol": "positions"}})}
STAGES: Final[tuple[dict[str, str], ...]] = ({}, POSITIONS, {})
REFUSAL_SECONDS: Final = 30.0


def export(revision: str, folder: Path) -> Path:
    """Write the files of a revision into a folder and return it.

    Raises:
        subprocess.CalledProcessError: Git does not know the revision.
    """
    content = subprocess.run(
        ["git", "archive", revision], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(folder, filter="data")
    return folder


class SupervisedFleet(FailoverFleet):
    """See `FailoverFleet`. Workers that ended by themselves are started again.

    Attributes:
        environments: The environment of each worker.
        restarts: Number of workers that were started again.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.environments: dict[str, Mapping[str, str] | None] = {}
        self.restarts = 0

    def start(self, *names: str, environment: Mapping[str, str] | None = None) -> None:
        """See `FailoverFleet.start`."""
        super().start(*names, environment=environment)
        self.environments |= dict.fromkeys(names, environment)

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """See `FailoverFleet.wait`."""

        def supervised() -> bool:
            ended = [name for name, worker in self.workers.items() if worker.poll() is not None]
            for name in ended:
                self.restarts += 1
                self.start(name, environment=self.environments[name])
            return not ended and condition()

        super().wait(what, supervised)

    def wait_committed(self, since: float) -> None:
        """Wait until running workers own all leases and have committed each of them since then.

        Args:
            since: Monotonic seconds.
        """

        def is_committed() -> bool:
            owners = self.owners()
            found = {(commit.shard_id, commit.worker) for commit in self.commits.since(since)}
            return set(owners.values()) <= set(self.workers) and owners.items() <= found

        self.wait("commits of all shards by their owners", is_committed)


class Upgrade(ProcessBenchmark):
    """Replaces the workers of one application on one embedded AWS."""

    def __init__(self, folder: Path, seed: int, older: Path) -> None:
        super().__init__(folder)
        self._rng = random.Random(seed)
        self._older = {"PYTHONPATH": str(older), "PYTHONSAFEPATH": "1"}
        self._started = 0
        self.sent = self.missing = self.duplicated = self.kills = self.restarts = 0
        self.seconds: list[float] = []
        self.protocol = self.older_worker = "unknown"

    def run(self) -> None:
        """Run all stages and count the output."""
        fleet = SupervisedFleet(
            "upgrade",
            self._folder,
            self._processes,
            self._kinesis,
            self.clock,
            size=NORMAL_BYTES,
            settings={},
        )
        try:
            for _ in range(WORKERS):
                self._start(fleet, self._older)
            fleet.wait("leases", lambda: bool(fleet.owners()))
            fleet.publisher.start()
            fleet.wait_committed(self.clock.monotonic())
            for stage in STAGES:
                for name in sorted(fleet.workers):
                    self._replace(fleet, name, stage)
            self.missing, self.duplicated = fleet.drain()
            self.sent = len(fleet.publisher.acknowledged)
            self.protocol, self.restarts = fleet.protocol(), fleet.restarts
            self.older_worker = self._starts_older(fleet)
        finally:
            fleet.stop()

    def _start(self, fleet: SupervisedFleet, environment: dict[str, str]) -> str:
        self._started += 1
        name = f"worker-{self._started}"
        fleet.start(name, environment=environment)
        return name

    def _replace(self, fleet: SupervisedFleet, name: str, environment: dict[str, str]) -> None:
        began = self.clock.monotonic()
        number = self._rng.choice([signal.SIGTERM, signal.SIGKILL])
        self.kills += number == signal.SIGKILL
        if self._rng.random() < 0.5:
            fleet.end(name, number)
            self._start(fleet, environment)
        else:
            self._start(fleet, environment)
            fleet.rest(self._rng.uniform(0.0, 6.0))
            fleet.end(name, number)
        fleet.wait_committed(self.clock.monotonic())
        self.seconds.append(self.clock.monotonic() - began)
        print(f"{name} replaced in {self.seconds[-1]:.1f} s", file=sys.stderr, flush=True)

    def _starts_older(self, fleet: SupervisedFleet) -> str:
        """Start a worker of the older revision and return whether it is refused."""
        name = self._start(fleet, self._older)
        deadline = self.clock.monotonic() + REFUSAL_SECONDS
        while self.clock.monotonic() < deadline and fleet.workers[name].poll() is None:
            self.clock.sleep(0.2)
        return "joined" if fleet.workers[name].poll() is None else "refused"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a record is missing or duplicated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--from", dest="revision", required=True, help="older revision of Git")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(arguments)
    with working_folder(options.folder, "upgrade-") as folder:
        benchmark = Upgrade(folder, options.seed, export(options.revision, folder / "older"))
        ended = False
        try:
            benchmark.start()
            benchmark.run()
            ended = True
        except TimedOutError as error:
            print(error, file=sys.stderr, flush=True)
        finally:
            benchmark.stop()
    report = {
        "from": options.revision,
        "sent": benchmark.sent,
        "missing": benchmark.missing,
        "duplicated": benchmark.duplicated,
        "kills": benchmark.kills,
        "restarts": benchmark.restarts,
        "protocol": benchmark.protocol,
        "older_worker": benchmark.older_worker,
        "settled_s": summary(benchmark.seconds) if benchmark.seconds else None,
    }
    if not options.json:
        for key, value in report.items():
            print(f"{key}: {value}")
    print(json.dumps(report))
    is_complete = ended and benchmark.sent > 0
    return int(not is_complete or bool(benchmark.missing or benchmark.duplicated))


if __name__ == "__main__":
    sys.exit(main())
