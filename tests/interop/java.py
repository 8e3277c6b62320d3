"""The Java KCL: its versions, the jars of Maven, and the command of a worker."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.setup import NotAvailable, kcl_pom, must

HERE = Path(__file__).parent
MAIN = "InteropWorker"
VERSIONS = {"3.5": "[3.5,4)", "3.4": "[3.4,3.5)", "3.1": "[3.1,3.2)", "2.7": "[2.7,3)"}
"""Ranges of Maven. The newest version of each is fetched once per folder of jars."""

LOGGING = ("warn", "org.slf4j", "slf4j-simple", "2.0.13")
OPTIONS = (
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    f"-Dorg.slf4j.simpleLogger.defaultLogLevel={LOGGING[0]}",
)
SHORT_TIMES = {
    "lease.failoverTimeMillis": "4000",
    "lease.shardSyncIntervalMillis": "1000",
    "metrics.workerMetricsReporterFreqInMillis": "10000",
    "coordinator.parentShardPollIntervalMillis": "1000",
}
SHORT_LOCK = {
    "lease.dynamoDbLockBasedLeaderLeaseDurationInMillis": "10000",
    "lease.dynamoDbLockBasedLeaderHeartbeatPeriodInMillis": "2500",
}
"""From 3.2. Before, the lock of a Java leader that crashed lasts two minutes."""


@dataclass(frozen=True, slots=True)
class JavaKcl:
    """One version of the Java KCL, fetched and compiled.

    Attributes:
        family: Key of `VERSIONS`.
        version: The version that Maven chose, such as `3.5.1`.
        class_path: Jars, and the classes of the worker.
    """

    family: str
    version: str
    class_path: str

    def command(self, arguments: Mapping[str, str]) -> list[str]:
        """Return the command of a worker. Keys are those of `InteropWorker.java`."""
        return [
            "java",
            *OPTIONS,
            "-cp",
            self.class_path,
            MAIN,
            *(f"{key}={value}" for key, value in arguments.items()),
        ]

    def short_times(self) -> dict[str, str]:
        """Return settings with which failover and balancing take seconds."""
        if self.family == "2.7":
            return {key: one for key, one in SHORT_TIMES.items() if not key.startswith("metrics")}
        return SHORT_TIMES | (SHORT_LOCK if self.family != "3.1" else {})


def fetch(kept: Path, family: str) -> JavaKcl:
    """Fetch the jars of a version, unless the folder has them, and compile the worker.

    Args:
        kept: Folder of the jars, kept between runs.
        family: Key of `VERSIONS`.

    Raises:
        NotAvailable: A tool is missing, or Maven cannot fetch; the message gives the reason.
    """
    for tool in ("java", "javac", "mvn"):
        if shutil.which(tool) is None:
            raise NotAvailable(f"there is no {tool} on PATH")
    folder = kept.resolve() / family
    folder.mkdir(parents=True, exist_ok=True)
    lib, classes = folder / "lib", folder / "classes"
    if not (folder / "ready").exists():
        shutil.rmtree(lib, ignore_errors=True)
        _, group, artifact, version = LOGGING
        (folder / "pom.xml").write_text(kcl_pom(VERSIONS[family], (group, artifact, version)))
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={lib}"]
        must(["mvn", "-q", "-B", *goal], folder)
        (folder / "ready").touch()
    class_path = f"{classes}{os.pathsep}{lib}/*"
    source = HERE / f"{MAIN}.java"
    compiled = classes / f"{MAIN}.class"
    if not compiled.exists() or compiled.stat().st_mtime < source.stat().st_mtime:
        must(["javac", "-nowarn", "-cp", class_path, "-d", str(classes), str(source)], folder)
    return JavaKcl(family, version_in(one.name for one in lib.iterdir()), class_path)


def version_in(jars: Iterable[str]) -> str:
    """Return the version of the KCL among file names of jars."""
    prefix = "amazon-kinesis-client-"
    found = [one.removeprefix(prefix) for one in jars if one.startswith(prefix)]
    return next(one.removesuffix(".jar") for one in found if one[0].isdigit())
