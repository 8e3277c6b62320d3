"""Two code locations on one application."""

from __future__ import annotations

import dagster as dg
import pytest

from kcl_pipeline import (
    AwsClients,
    DeltaSink,
    EmbeddedAws,
    KinesisPipeline,
    KinesisPipelineComponent,
)

pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")


@pytest.fixture
def stream(monkeypatch):
    with EmbeddedAws() as aws:
        for name, value in aws.environment().items():
            monkeypatch.setenv(name, value)
        pipeline = KinesisPipeline("orders", ["orders"], DeltaSink("unused/orders"))
        clients = AwsClients(pipeline.settings)
        clients.kinesis.create_stream(StreamName="orders", ShardCount=2)
        yield pipeline
        clients.close()


def tick(defs: dg.Definitions, location: str, instance: dg.DagsterInstance) -> str:
    """Run a tick of the leader sensor of a code location, and return what it says."""
    sensor = defs.resolve_sensor_def("orders_leader")
    with dg.build_sensor_context(
        instance=instance,
        definitions=defs,
        resources=dict(defs.resources or {}),
        sensor_name=sensor.name,
        repository_name=location,
    ) as context:
        return str(sensor.evaluate_tick(context).cursor)


def test_one_of_two_code_locations_leads(stream):
    one, two = (
        KinesisPipelineComponent(stream).build_defs(dg.ComponentTree.for_test().load_context)
        for _ in range(2)
    )
    with dg.DagsterInstance.ephemeral() as instance:
        stream.ensure_tables()
        for _ in range(3):
            said = tick(one, "one", instance), tick(two, "two", instance)
            assert said[0].startswith('{"tick": "led: 2 leases'), said
            assert said[1].startswith('{"tick": "did not lead'), said
            assert "/one/orders_leader leads since" in said[1]
