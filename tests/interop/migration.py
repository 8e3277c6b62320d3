"""Migrate an application with real Java workers: `python -m tests.interop.migration`.

KCL 2.7 runs; a worker of this package joins, then one of Java 3.5; 2.7 is stopped; the version
changes after ten minutes; it is rolled back, and 2.7 joins again. Prints what was seen, with
seconds. Takes about 15 minutes. The exit code is 1 if a step is not seen.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.embedded import ROOT, working_folder
from benchmarks.peers.setup import NotAvailable
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.leases.layout import (
    LOOK_SECONDS,
    VERSION_2X,
    VERSION_3X_WITH_ROLLBACK,
    VERSION_UPGRADE_FROM_2X,
    followed_by,
)
from kcl_pipeline.local.demo.processes import Processes, free_port

from .checks import all_held, check_logs, settle
from .fleet import Application, CaseFailedError, InteropFleet
from .java import JavaKcl, fetch

COMPATIBLE = "CLIENT_VERSION_CONFIG_COMPATIBLE_WITH_2X"
CHANGE_SECONDS = 1_200.0
"""Ten minutes, the checks before and after them, and a slow machine."""


class Migration:
    """One application on its way."""

    def __init__(self, fleet: InteropFleet, later: JavaKcl) -> None:
        self._fleet = fleet
        self._later = later
        self._began = fleet.clock.monotonic()

    def run(self) -> None:
        """Go all the way.

        Raises:
            CaseFailedError: A step was not seen in time.
        """
        fleet = self._fleet
        older = fleet.start("java")
        fleet.wait("leases of KCL 2.7", lambda: all_held(fleet), 240)
        self._say("KCL 2.7 has all leases")
        self._join("ours", "this package")
        self._require(VERSION_UPGRADE_FROM_2X)
        first = fleet.application
        settings = {"coordinator.clientVersionConfig": COMPATIBLE}
        fleet.application = replace(first, java=self._later, java_settings=settings)
        self._join("java", f"Java {self._later.version}")
        fleet.stop(older)
        fleet.wait("all leases", lambda: all_held(fleet), 240)
        self._check("KCL 2.7 is stopped")
        fleet.wait(
            "the version", lambda: self._version() == VERSION_3X_WITH_ROLLBACK, CHANGE_SECONDS
        )
        fleet.wait("a leader", lambda: fleet.leader() is not None, 240)
        self._check(f"{fleet.leader()} leads")
        self._roll_back()
        fleet.application = first
        self._join("java", "KCL 2.7 again")
        self._check("the end")

    def _join(self, side: str, what: str) -> None:
        """Start a worker, and wait until it has a lease and every shard has an owner."""
        fleet = self._fleet
        name = fleet.start(side)
        fleet.wait(f"leases of {name}", lambda: self._owners()[name] > 0 and all_held(fleet), 240)
        self._say(f"{what} has joined as {name}")

    def _roll_back(self) -> None:
        table = self._fleet.tables.coordinator
        found, now = table.read_migration(), int(self._fleet.clock.wall() * 1000)
        wanted = followed_by(found, VERSION_2X, "KclMigrationTool-rollback", now)
        if not table.put_migration(wanted, replacing=found):
            raise CaseFailedError("the version was changed by somebody else")
        # Java looks every minute, and waits up to half a minute more
        self._fleet.clock.sleep(1.5 * LOOK_SECONDS)

    def _check(self, what: str) -> None:
        settle(self._fleet)
        check_logs(self._fleet)
        self._say(what)

    def _require(self, version: str) -> None:
        if self._version() != version:
            raise CaseFailedError(f"the version is {self._version()}, and not {version}")

    def _version(self) -> str | None:
        found = self._fleet.tables.coordinator.read_migration()
        return None if found is None else str(found.client_version)

    def _owners(self) -> Counter[str | None]:
        return Counter(lease.owner for lease in self._fleet.leases().values())

    def _say(self, what: str) -> None:
        found = self._fleet.tables.coordinator
        state = found.read_migration() if "ours" in {w[:4] for w in self._fleet.workers} else None
        version = "" if state is None else f"; {state.client_version} by {state.modified_by}"
        seconds = self._fleet.clock.monotonic() - self._began
        print(f"{seconds:6.0f} s  {what}; {dict(self._owners())}{version}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="tests.interop.migration", description=__doc__)
    jars = Path(os.environ.get("KCL_PIPELINE_INTEROP_JARS", ".run/interop"))
    parser.add_argument("--jars", type=Path, default=jars)
    parser.add_argument("--folder", type=Path, help="keep tables and logs here")
    given = parser.parse_args(arguments)
    try:
        older, later = fetch(given.jars, "2.7"), fetch(given.jars, "3.5")
    except NotAvailable as reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    clock = SystemClock()
    settings = {"client_version_config": COMPATIBLE}
    application = Application("migration", older, "java", shards=6, settings=settings)
    with working_folder(given.folder, "interop-") as folder:
        processes = Processes(folder, clock)
        processes.environment["PYTHONPATH"] = str(ROOT)
        processes.start_aws(free_port(0))
        try:
            fleet = InteropFleet(application, processes, clock)
            fleet.traffic.start()
            try:
                Migration(fleet, later).run()
            finally:
                fleet.traffic.stop()
            settle(fleet)
            counted = fleet.counted()
            print(f"{len(fleet.traffic.sent)} sent, {len(counted.missing)} missing")
            return 1 if counted.missing else 0
        except CaseFailedError as error:
            print(f"FAILED: {error}")
            return 1
        finally:
            processes.stop_all()


if __name__ == "__main__":
    sys.exit(main())
