"""Shared by all tests: one Spark session for the whole run, because a session takes five seconds to
start.

Property tests draw the same cases in every run, so that a run tells about the change and not about
the day; `HYPOTHESIS_PROFILE=explore` draws new ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

# fixtures of the fan-out files
from tests.support.fan_out_world import aws, over, subscriptions  # noqa: F401

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.dagster_stage import Stage


settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


# For JVMs that live for seconds: without the second compiler and the collector's threads they take
# two thirds of the processor time
os.environ.setdefault("SPARK_SUBMIT_OPTS", JVM := "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

SEEDS = pytest.StashKey[subprocess.Popen[str]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """The seeds take both cores for minutes, and most other tests wait for something: the seeds get
    what is left over, from the beginning on.
    """
    if not session.config.option.collectonly and any(
        "seeds_of_ci" in getattr(item, "fixturenames", ()) for item in session.items
    ):
        command = [
            "nice",
            "-n",
            "19",
            sys.executable,
            "-m",
            "verification.simulate",
            "--ci",
            "--json",
        ]
        session.config.stash[SEEDS] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    """Whatever ends the run ends the seeds."""
    seeds = config.stash.get(SEEDS, None)
    if seeds is not None and seeds.poll() is None:
        seeds.terminate()
        seeds.wait(30)


@pytest.fixture(scope="session")
def seeds_of_ci(request: pytest.FixtureRequest) -> subprocess.CompletedProcess[str]:
    """The fixed seeds and those of the commit, run to their end."""
    seeds = request.config.stash[SEEDS]
    out, report = seeds.communicate(timeout=1_100)
    return subprocess.CompletedProcess(seeds.args, seeds.returncode, out, report)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A Spark session on two cores; `test_spark_ways` runs itself once more where
    KCL_TEST_SPARK_MASTER says.
    """
    # runs without Spark tests need no pyspark
    from kcl_pipeline.spark.session import build_session  # noqa: PLC0415

    session = build_session(
        "tests",
        {
            "spark.master": os.environ.get("KCL_TEST_SPARK_MASTER", "local[2]"),
            "spark.executor.extraJavaOptions": JVM,
        },
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One `dagster dev` with a consuming pipeline, for all tests that look at it from outside,
    because it takes fifteen seconds to start.
    """
    # runs without these tests start nothing
    from tests.support.dagster_stage import dagster_stage  # noqa: PLC0415

    with dagster_stage(tmp_path_factory.mktemp("stage")) as stage:
        yield stage
