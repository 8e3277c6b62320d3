"""One `dagster dev` for the tests of this folder, which end with it: it works on until it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.dagster_stage import Stage, dagster_stage


@pytest.fixture(scope="package")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A consuming pipeline, for all tests that look at it from outside, because it takes fifteen
    seconds to start.
    """
    with dagster_stage(tmp_path_factory.mktemp("stage")) as running:
        yield running
