"""Fixtures of one embedded AWS per module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kcl_pipeline.local import EmbeddedAws
from tests.support.local_aws import client, new_stream


@pytest.fixture(scope="module")
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as running:
        yield running


@pytest.fixture(scope="module")
def kinesis(aws: EmbeddedAws) -> Any:
    return client(aws)


@pytest.fixture
def name(kinesis: Any) -> str:
    return new_stream(kinesis, 1)
