"""`kcl-pipeline do replay` (embedded AWS)."""

from __future__ import annotations

from collections import Counter

import pytest
from deltalake import DeltaTable

from kcl_pipeline.aws import AwsClients
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.control import replay
from tests.support.cli_fleet import run, run_json
from tests.support.dead_letters import letter, store
from tests.support.local_aws import fresh_name

pytest_plugins = ["tests.support.cli_fixtures"]
pytestmark = pytest.mark.usefixtures("environment")

MODULE = """
from kcl_pipeline import DeltaSink, KinesisPipeline
from tests.support.replay_world import FAST, only_data

orders = KinesisPipeline(
    name={name!r}, streams=[{name!r}], transform_arrow=only_data, sink=DeltaSink("table"),
    settings_overrides=FAST,
)
"""


@pytest.fixture
def pipeline(server, tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "SETTLE_SECONDS", 0.1)
    name = fresh_name("cli-replay")
    module = name.replace("-", "_")
    (tmp_path / f"{module}.py").write_text(MODULE.format(name=name))
    monkeypatch.chdir(tmp_path)
    settings = ConsumerSettings(application_name=name, streams=(name,))
    kinesis = AwsClients(settings).kinesis
    kinesis.create_stream(StreamName=name, ShardCount=2)
    kinesis.put_records(
        StreamName=name, Records=[{"Data": b"%d" % n, "PartitionKey": str(n)} for n in range(20)]
    )
    return f"{module}:orders"


def rows(uri):
    return Counter(DeltaTable(uri).to_pyarrow_table().column("data").to_pylist())


def test_a_dry_run_says_what_would_happen(pipeline, tmp_path):
    found = run_json("do", "replay", "-p", pipeline, "--from", "1h", "--into", "side", "--dry-run")
    name = found["streams"][0]
    assert found["application"] == f"{name}-replay-{found['replay_id']}"
    assert (found["dry_run"], found["is_continued"], found["in_place"]) == (True, False, False)
    assert list(found["shards"]) == [name]
    text = run("do", "replay", "-p", pipeline, "--from", "1h", "--in-place", "--dry-run").stdout
    assert "in table, the table of the pipeline; its rows are repeated" in text
    assert "dry run: nothing was written" in text
    assert "would begin: application " in text
    assert not (tmp_path / "side").exists()


def test_the_records_are_replayed_into_a_side_table_and_in_place(pipeline):
    result = run("do", "replay", "-p", pipeline, "--from", "1h", "--into", "side", "--id", "first")
    assert "the replay first begins: application cli-replay-" in result.stderr
    assert "20 records replayed, 20 rows written and 0 records failed in this run" in result.stdout
    assert "the replay first is complete; its DynamoDB tables are deleted" in result.stdout
    records = Counter(b"%d" % n for n in range(20))
    assert rows("side") == records
    found = run_json("do", "replay", "-p", pipeline, "--from", "1h", "--in-place")
    assert (found["is_complete"], found["run"]["records"]) == (True, 20)
    assert rows("table") == records
    again = run(
        "do", "replay", "-p", pipeline, "--from", "1h", "--into", "side", "--id", "first", code=1
    )
    assert "the replay 'first' has ended" in again.stderr


def test_dead_letters_are_replayed_in_place(pipeline):
    store("table_dead_letters", letter(1, data=b"one"), letter(2, data=b"two"))
    shown = run_json("do", "replay", "-p", pipeline, "--dead-letters", "--in-place", "--dry-run")
    assert (shown["dead_letters"]["records"], shown["shards"]) == (2, {"orders": 1})
    result = run("do", "replay", "-p", pipeline, "--dead-letters", "--in-place")
    assert "2 dead letters in " in result.stderr
    assert "2 records replayed, 2 rows written and 0 records failed again" in result.stdout
    assert "2 dead letters marked as replayed" in result.stdout
    assert rows("table") == Counter([b"one", b"two"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--from is missing; write a time such as"),
        (["--from", "1h"], "the table is missing; write --into ADDRESS"),
        (["--dead-letters"], "the table is missing; write --into ADDRESS"),
        (["--from", "1h", "--into", "table"], "is the table of the pipeline"),
        (["--from", "1h", "--in-place", "--id", "A"], "the id 'A' is not usable"),
    ],
)
def test_wrong_options(pipeline, arguments, sentence):
    assert sentence in run("do", "replay", "-p", pipeline, *arguments, code=1).stderr
