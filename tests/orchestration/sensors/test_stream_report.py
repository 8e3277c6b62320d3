"""Streams in Dagster: those of the settings, and those that appear at run time."""

from __future__ import annotations

from dataclasses import replace

import dagster as dg

from kcl_pipeline.leases.application import ApplicationIdentity, RecordedStream
from kcl_pipeline.leases.layout import ensure_client_version
from kcl_pipeline.orchestration.definitions import build_definitions
from kcl_pipeline.worker_status import StreamLag, UnavailableStream, WorkerStatus
from tests.support.dagster_fakes import FakeCycle, FakePipeline, leases, led, worker
from tests.support.sensor_stage import (  # noqa: F401 (fixtures)
    Stage,
    instance_fixture,
)

ARN = "arn:aws:kinesis:eu-central-1:{}:stream/{}"
SELECTED = {"selects_streams": True}


def record(stage: Stage, *streams: RecordedStream) -> None:
    """Write the recorded streams, as the leader does."""
    if stage.coordinator.read_migration() is None:
        ensure_client_version(stage.coordinator, "w-1", stage.clock)
    before = stage.coordinator.read_application()
    identity = ApplicationIdentity("multi_stream", streams)
    assert stage.coordinator.put_application(identity, replacing=before)


def reported(name: str, *lags: StreamLag):
    return replace(worker(name), status=WorkerStatus(9_000, streams=lags))


def events_of(result: dg.SensorResult, kind: type) -> dict[str, dict[str, object]]:
    """Metadata by asset key, with the partition."""
    return {
        "/".join([*event.asset_key.path, *([event.partition] if event.partition else [])]): {
            name: value.value if hasattr(value, "value") else value
            for name, value in event.metadata.items()
        }
        for event in result.asset_events
        if isinstance(event, kind)
    }


def test_a_stream_that_appears_at_run_time_has_lag_and_a_partition_without_a_reload(instance):
    rows = leases(2, ["w-1", "w-2"], "1:orders:5")
    more = leases(4, ["w-1", "w-2"], "1:clicks:7")
    first = [reported("w-1", StreamLag("1:orders:5", 1_500)), reported("w-2")]
    then = [
        reported("w-1", StreamLag("1:orders:5", 20), StreamLag("1:clicks:7", 4_000, 1)),
        reported("w-2", StreamLag("1:clicks:7", 90_000, 1)),
    ]
    pipeline = FakePipeline(
        streams=(), overrides=SELECTED, cycle=FakeCycle([led(rows, first), led(rows + more, then)])
    )
    stage = Stage(instance, pipeline)
    orders, clicks = (RecordedStream(ARN.format(1, name)) for name in ("orders", "clicks"))
    record(stage, orders)
    result = stage(10)
    assert events_of(result, dg.AssetObservation)["kinesis/orders"]["lag_seconds"] == 1.5
    selected = events_of(result, dg.AssetMaterialization)["orders-eu/streams/orders"]
    assert (selected["lag_seconds"], selected["shards_being_read"]) == (1.5, 2)
    (request,) = result.dynamic_partitions_requests
    assert request.partitions_def_name == "orders_eu_streams"
    assert request.partition_keys == ["orders"]
    instance.add_dynamic_partitions(request.partitions_def_name, request.partition_keys)

    record(stage, orders, clicks)
    result = stage(10)
    observed = events_of(result, dg.AssetObservation)
    assert observed["kinesis/clicks"]["lag_seconds"] == 90.0
    assert observed["kinesis/clicks"]["lag"].endswith("; not read yet: 2 shards")
    assert observed["kinesis/clicks"]["shards_with_lease"] == 4
    assert "kinesis/orders" not in observed, "nothing of it has changed"
    (request,) = result.dynamic_partitions_requests
    assert (type(request), request.partition_keys) == (dg.AddDynamicPartitionsRequest, ["clicks"])
    instance.add_dynamic_partitions(request.partitions_def_name, request.partition_keys)
    assert not stage(10).dynamic_partitions_requests

    record(stage, clicks)
    (request,) = stage(10).dynamic_partitions_requests
    assert isinstance(request, dg.DeleteDynamicPartitionsRequest)
    assert request.partition_keys == ["orders"]


def test_dagster_keeps_the_page_of_a_stream_that_no_definition_names(instance):
    rows = leases(2, ["w-1"], "1:orders:5")
    pipeline = FakePipeline(
        streams=(), overrides=SELECTED, cycle=FakeCycle([led(rows, [worker("w-1")])])
    )
    stage = Stage(instance, pipeline)
    record(stage, RecordedStream(ARN.format(1, "orders")))
    for event in stage(10).asset_events:
        instance.report_runless_asset_event(event)
    assert dg.AssetKey(["kinesis", "orders"]) in instance.get_asset_keys()
    selected = dg.AssetKey(["orders-eu", "streams"])
    assert instance.get_materialized_partitions(selected) == {"orders"}


def test_the_selected_streams_are_one_asset_in_front_of_the_output():
    defs = build_definitions(FakePipeline(streams=(), overrides=SELECTED))
    dg.Definitions.validate_loadable(defs)
    graph = defs.resolve_asset_graph()
    node = graph.get(dg.AssetKey(["orders-eu", "streams"]))
    assert isinstance(node.partitions_def, dg.DynamicPartitionsDefinition)
    assert node.child_keys == {dg.AssetKey(["orders-eu", "per_minute"])}


def test_two_streams_of_one_name_have_assets_of_their_own(instance):
    """The definitions of such a pipeline could not be loaded."""
    other = ARN.format(2, "orders")
    rows = leases(2, ["w-1"], "1:orders:5") + leases(4, ["w-1"], "2:orders:6")
    workers = [reported("w-1", StreamLag("1:orders:5", 1_000), StreamLag("2:orders:6", 2_000))]
    pipeline = FakePipeline(streams=("orders", other), cycle=FakeCycle([led(rows, workers)]))
    dg.Definitions.validate_loadable(build_definitions(pipeline))
    result = Stage(instance, pipeline)(10)
    observed = events_of(result, dg.AssetObservation)
    found = {
        key: (one["shards_with_lease"], one["lag_seconds"])
        for key, one in observed.items()
        if key.startswith("kinesis/")
    }
    assert found == {"kinesis/orders": (2, 1.0), "kinesis/2/orders": (4, 2.0)}
    table = events_of(result, dg.AssetObservation)["orders-eu/fleet"]
    assert "streams" in table


def test_a_recorded_stream_without_leases_fails_the_coverage(instance):
    rows = leases(2, ["w-1"], "1:orders:5")
    gone = UnavailableStream("clicks", "the stream clicks does not exist")
    pipeline = FakePipeline(
        streams=(),
        overrides=SELECTED,
        cycle=FakeCycle([led(rows, [worker("w-1")], unavailable=(gone,))]),
    )
    stage = Stage(instance, pipeline)
    record(stage, *(RecordedStream(ARN.format(1, name)) for name in ("orders", "clicks")))
    results = [stage(10).asset_events for _ in range(5)]
    found = [
        e for result in results for e in result if getattr(e, "check_name", "") == "shards_covered"
    ]
    assert {check.passed for check in found} == {False}
    assert f"{ARN.format(1, 'clicks')}: no lease at all" in found[-1].description


def test_many_streams_are_reported_less_often(instance):
    """An event stays in Dagster's log for ever."""
    names = [f"s{number:03}" for number in range(100)]
    rows = [lease for name in names for lease in leases(2, ["w-1"], f"1:{name}:5")]
    moved = [lease.with_(owner="w-2") for lease in rows]
    cycle = FakeCycle([led(rows, [worker("w-1")]), led(moved, [worker("w-2")])])
    stage = Stage(instance, FakePipeline(streams=tuple(names), cycle=cycle))

    def count():
        observed = events_of(stage(10), dg.AssetObservation)
        return sum(key.startswith("kinesis/") for key in observed)

    assert count() == 100
    assert sum(count() for _ in range(60)) == 0, "moves of many streams are in the fleet's table"
