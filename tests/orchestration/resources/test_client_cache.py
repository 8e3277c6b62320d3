"""A process that sees new credentials every hour keeps a bounded number of clients."""

from __future__ import annotations

import gc
import weakref

import pytest

from kcl_pipeline.aws import KEPT_CLIENTS, KinesisSource, SessionOptions
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.orchestration.resources import AwsResource

SETTINGS = ConsumerSettings(application_name="orders", streams=("orders",))
OURS = {
    "region_name": "eu-central-1",
    "endpoint_url": "http://127.0.0.1:1",
    "aws_access_key_id": "a",
    "aws_secret_access_key": "b",
}


def of_resource(token):
    return AwsResource(**OURS, aws_session_token=token).clients(SETTINGS)


def of_source(token):
    return KinesisSource(SETTINGS, SessionOptions(**OURS, aws_session_token=token)).open()


@pytest.mark.parametrize("open_client", [of_resource, of_source])
def test_clients_of_old_credentials_are_dropped(open_client):
    made = [weakref.ref(open_client(f"token-{n}")) for n in range(KEPT_CLIENTS + 4)]
    gc.collect()
    alive = [n for n, client in enumerate(made) if client() is not None]
    assert alive == list(range(4, KEPT_CLIENTS + 4))


def test_a_client_in_use_is_not_dropped_for_newer_ones():
    used = of_resource("in-use")
    for n in range(2 * KEPT_CLIENTS):
        of_resource(f"newer-{n}")
        assert of_resource("in-use") is used
