"""Shared by all tests: one Spark session for the whole run, because a session takes five seconds to start.

Property tests draw the same cases in every run, so that a run tells about the change and not about the day; `HYPOTHESIS_PROFILE=explore` draws new ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from fan_out_world import aws, over, subscriptions  # noqa: F401 (fixtures of the fan-out files)
from hypothesis import settings

if TYPE_CHECKING:
    from dagster_stage import Stage
    from pyspark.sql import SparkSession


settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A Spark session on two cores; `test_spark_ways` runs itself once more where KCL_TEST_SPARK_MASTER says."""
    from kcl_pipeline.spark.session import build_session  # noqa: PLC0415 (runs without Spark tests need no pyspark)

    session = build_session("tests", {"spark.master": os.environ.get("KCL_TEST_SPARK_MASTER", "local[2]")})
    yield session
    session.stop()


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One `dagster dev` with a consuming pipeline, for all tests that look at it from outside, because it takes fifteen seconds to start."""
    from dagster_stage import dagster_stage  # noqa: PLC0415 (runs without these tests start nothing)

    with dagster_stage(tmp_path_factory.mktemp("stage")) as stage:
        yield stage
