"""Fixtures for the results of Spark functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kcl_pipeline.events import Event
from kcl_pipeline.spark.writer import SparkBatchWriter
from tests.support.result_files import writers


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def ways(spark, tmp_path: Path, events: list[Event]) -> Callable[..., list[SparkBatchWriter]]:
    """Two writers for a function: through memory, and by Python tasks."""

    def build(transform, partition_by: tuple[str, ...] = ()) -> list[SparkBatchWriter]:
        return writers(spark, tmp_path, transform, partition_by, events)

    return build
