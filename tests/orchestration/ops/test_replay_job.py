"""The job that replays a time range, executed in process against the embedded AWS."""

from __future__ import annotations

from collections import Counter

import dagster as dg
import pytest
from deltalake import DeltaTable

from kcl_pipeline import DeltaSink, KinesisPipeline
from kcl_pipeline.aws import AwsClients
from kcl_pipeline.control import replay
from kcl_pipeline.orchestration.names import REPLAY_TAG, python_name
from tests.support.dead_letters import letter, store
from tests.support.local_aws import fresh_name
from tests.support.replay_world import FAST, only_data

pytest_plugins = ["tests.support.cli_fixtures"]
pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture
def pipeline(server, tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "SETTLE_SECONDS", 0.1)
    name = fresh_name("job-replay")
    found = KinesisPipeline(
        name=name,
        streams=[name],
        transform_arrow=only_data,
        sink=DeltaSink(str(tmp_path / "table")),
        settings_overrides=FAST,
    )
    kinesis = AwsClients(found.settings).kinesis
    kinesis.create_stream(StreamName=name, ShardCount=1)
    kinesis.put_records(
        StreamName=name, Records=[{"Data": b"%d" % n, "PartitionKey": str(n)} for n in range(9)]
    )
    return found


def execute(pipeline, instance, **config):
    name = python_name(pipeline.name)
    return (
        pipeline.definitions()
        .resolve_job_def(f"{name}_operate")
        .execute_in_process(
            run_config={
                "ops": {f"{name}_operation": {"config": {"operation": {"replay": config}}}}
            },
            instance=instance,
            raise_on_error=False,
        )
    )


def outcome(result):
    (event,) = result.get_asset_observation_events()
    return event.asset_observation_data.asset_observation.metadata


def test_the_form_shows_first_and_replays_then(pipeline, tmp_path):
    side = str(tmp_path / "side")
    with dg.DagsterInstance.ephemeral() as instance:
        shown = outcome(execute(pipeline, instance, from_time="1h", into=side, dry_run=True))
        assert "dry run: nothing was written" in shown["outcome"].value
        assert not DeltaTable.is_deltatable(side)
        result = execute(pipeline, instance, from_time="1h", into=side)
        found = outcome(result)
        replay_id = result.run_id[:8]
        assert f"the replay {replay_id} is complete" in found["outcome"].value
        assert found["result"].value["run"]["records"] == 9
        tags = instance.get_run_by_id(result.run_id).tags
        assert tags[REPLAY_TAG] == f"{pipeline.name}-replay-{replay_id}"
    rows = DeltaTable(side).to_pyarrow_table().column("data").to_pylist()
    assert Counter(rows) == Counter(b"%d" % n for n in range(9))


def test_dead_letters_are_replayed_and_marked(pipeline):
    store(pipeline.sink.dead_letters, letter(1, data=b"one"))
    with dg.DagsterInstance.ephemeral() as instance:
        options = {"dead_letters": True, "in_place": True}
        found = outcome(execute(pipeline, instance, **options))
    assert "1 dead letter marked as replayed" in found["outcome"].value
    assert (found["result"].value["marked"], found["result"].value["run"]["records"]) == (1, 1)
    rows = DeltaTable(pipeline.sink.uri).to_pyarrow_table().column("data").to_pylist()
    assert rows == [b"one"]


def test_a_refused_replay_fails_with_one_sentence(pipeline):
    with dg.DagsterInstance.ephemeral() as instance:
        result = execute(pipeline, instance, from_time="1h")
        name = f"{python_name(pipeline.name)}_operation"
        text = result.failure_data_for_node(name).user_failure_data.description
        assert text.startswith("the table is missing; write --into ADDRESS")
