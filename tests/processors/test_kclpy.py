"""Applications of kclpy run with their import changed, from their properties file."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import boto3
import pytest
from typer.testing import CliRunner

from kcl_pipeline import EmbeddedAws
from kcl_pipeline.cli import app
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.processors.kclpy import checkpoint_error, kcl, messages
from kcl_pipeline.processors.kclpy.kcl import script_processor
from kcl_pipeline.processors.kclpy.v2 import processor as v2
from kcl_pipeline.processors.kclpy.v3 import processor as v3
from kcl_pipeline.processors.properties import KEYS, parse_properties, read_properties
from kcl_pipeline.threads import Background
from kcl_pipeline.worker.summary import StopReason
from tests.processors.log import row_of
from tests.support.worker_world import World, numbered

HERE = Path(__file__).parent
STREAM = "kclpysample"


@pytest.fixture
def aws(monkeypatch):
    with EmbeddedAws() as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        boto3.client("kinesis").create_stream(StreamName=STREAM, ShardCount=2)
        for number in range(20):
            boto3.client("kinesis").put_record(
                StreamName=STREAM, PartitionKey=f"k{number}", Data=f"v{number}".encode()
            )
        yield running


def run(*options):
    return CliRunner().invoke(app, ["worker", "--drain", "--json", *map(str, options)])


def test_the_sample_application_runs_with_its_properties_file(aws, tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("SAMPLE_LOG", str(log))
    result = run("--properties", HERE / "sample.properties")
    assert result.exit_code == 0, result.output
    lines = log.read_text().splitlines()
    records = [line.split()[2] for line in lines if line.startswith("record")]
    assert sorted(records) == sorted(f"v{number}" for number in range(20))
    counts = Counter(line.split()[0] for line in lines)
    assert counts == {"initialize": 2, "record": 20, "shutdown_requested": 2, "lease_lost": 2}
    rows = boto3.client("dynamodb").scan(TableName="PythonKCLSample")["Items"]
    checkpoints = [row["checkpoint"]["S"] for row in rows if "checkpoint" in row]
    assert len(checkpoints) == 2
    assert all(text.isdigit() for text in checkpoints), "shutdown_requested has checkpointed"


def test_a_class_and_a_script_by_option(aws, tmp_path, monkeypatch):
    monkeypatch.setenv("SAMPLE_LOG", str(tmp_path / "log"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_app.py").write_text(
        "from kcl_pipeline import RecordProcessor\n"
        "class MyProcessor(RecordProcessor):\n"
        "    def process_records(self, process_records_input):\n"
        "        with open('data', 'a') as file:\n"
        "            for record in process_records_input.records:\n"
        "                file.write(record.binary_data.decode() + '\\n')\n"
        "        process_records_input.checkpointer.checkpoint()\n"
    )
    stream = ("--stream", STREAM)
    result = run("--processor", "my_app:MyProcessor", "--application", "app-1", *stream)
    sys.modules.pop("my_app", None)
    assert result.exit_code == 0, result.output
    assert len((tmp_path / "data").read_text().splitlines()) == 20
    script = HERE / "sample_app.py"
    result = run("--processor", script, "--application", "app-2", *stream)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "log").read_text().count("record") == 20


ALL_KEYS = {
    "executableName": str(HERE / "sample_app.py"),
    "applicationName": "everything",
    "streamName": STREAM,
    "streamArn": f"arn:aws:kinesis:us-east-1:123456789012:stream/{STREAM}",
    "workerId": "w-1",
    "workerIdentifier": "w-2",
    "regionName": "us-east-1",
    "initialPositionInStream": "LATEST",
    "initialPositionInStreamExtended": "1636609142",
    "timeoutInSeconds": "600",
    "tableName": "everything",
    "clientVersionConfig": "CLIENT_VERSION_CONFIG_3X",
    "retrievalMode": "POLLING",
    "fanoutConfig.consumerName": "everything",
    "workerMetricsEMAAlpha": "0.5",
    "dampeningPercentage": "60",
    "reBalanceThresholdPercentage": "10",
    "maxRecords": "100000",
    "idleTimeBetweenReadsInMillis": "0",
    "logWarningForTaskAfterMillis": "900000",
    "staleWorkerMetricsEntryCleanupDuration": "P1DT1H",
    "maxThroughputPerHostKBps": "10240.5",
    "coordinatorStateTableName": "everything-state",
    "workerMetricsTableName": "everything-workers",
    "failoverTimeMillis": "10000",
    "taskBackoffTimeMillis": "500",
    "leaseAssignmentIntervalMillis": "20000",
    "gracefulLeaseHandoffTimeoutMillis": "30000",
    "parentShardPollIntervalMillis": "10000",
    "listShardsBackoffTimeInMillis": "1500",
    "workerMetricsReporterFreqInMillis": "30000",
    "inMemoryWorkerMetricsCaptureFrequencyMillis": "1000",
}


def value_of(key):
    """A value for each key of the MultiLangDaemon, by the form of its name."""
    if key in ALL_KEYS:
        return ALL_KEYS[key]
    if key.endswith("Tags"):
        return "team=orders,stage=test"
    if key.endswith("BillingMode"):
        return "PAY_PER_REQUEST"
    if key == "disableWorkerMetrics" or key.endswith(
        ("Enabled", "Overshoot", "Assignment", "Shards", "Completion")
    ):
        return "false"
    return "10"


def test_a_worker_starts_with_every_key(aws, tmp_path, monkeypatch):
    monkeypatch.setenv("SAMPLE_LOG", str(tmp_path / "log"))
    values = {key: value_of(key) for key in KEYS if key != "fanoutConfig"}
    values |= {key: value for key, value in ALL_KEYS.items() if "." in key}
    file = tmp_path / "all.properties"
    file.write_text("\n".join(f"{key} = {value}" for key, value in values.items()))
    given = read_properties(file)
    assert given.worker_id == "w-1"
    assert set(KEYS) - {note.split()[0] for note in given.notes} - set(values) <= {"fanoutConfig"}
    result = run("--properties", file)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "log").read_text().count("record") == 20


def test_every_key_has_a_setting_that_exists_or_a_reason(tmp_path):
    options = {"name", "streams", "--processor", "--worker-id", "AWS_REGION"}
    settings = KinesisPipeline("app", ["s"], processor=v3.RecordProcessorBase).settings
    for key, known in KEYS.items():
        assert known.setting or known.reason, key
        target = settings
        for part in known.setting.split(".") if known.setting not in options else ():
            if part:
                assert hasattr(target, part), (key, known.setting)
                target = getattr(target, part)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = 1", {"a": "1"}),
        ("a=1\nb:2\nc 3", {"a": "1", "b": "2", "c": "3"}),
        ("# comment\n! comment\n\n  a = 1  ", {"a": "1"}),
        ("a = one, \\\n    two", {"a": "one, two"}),
        ("a\\ b = c\\=d\\u0041\\t.", {"a b": "c=dA\t."}),
        ("a =", {"a": ""}),
        ("path = c:\\\\x", {"path": "c:\\x"}),
    ],
)
def test_the_form_of_a_properties_file(text, expected):
    assert parse_properties(text) == expected


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("streamName = s", "has no applicationName"),
        ("applicationName = app", "has no stream"),
        ("applicationName = app\nstreamName = s\nmaxRecords = many", "maxRecords = many cannot"),
        (
            "applicationName = app\nstreamName = s\nstaleWorkerMetricsEntryCleanupDuration = 1 day",
            "is not a duration such as PT15M",
        ),
    ],
)
def test_a_wrong_properties_file(tmp_path, lines, sentence):
    file = tmp_path / "app.properties"
    file.write_text(lines)
    with pytest.raises(SettingsError, match=sentence):
        read_properties(file)


@pytest.mark.parametrize(
    ("line", "mode"),
    [("", "fan_out"), ("maxRecords = 10", "polling"), ("retrievalMode = FANOUT", "fan_out")],
)
def test_the_mode_of_reading_is_that_of_the_multilangdaemon(tmp_path, line, mode):
    file = tmp_path / "app.properties"
    file.write_text(f"applicationName = app\nstreamName = s\n{line}")
    given = read_properties(file)
    assert given.overrides["retrieval"]["retrieval_mode"] == mode
    assert given.overrides["shard_sync"]["initial_position_in_stream"] == "LATEST"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--processor", "a:B"], "needs --application NAME"),
        (["--processor", "a:B", "-a", "app"], "needs --stream NAME"),
        (["-s", "s"], "write --processor, too"),
        (["--processor", "a:B", "-p", "b:c"], "remove --processor and --properties"),
        (["--processor", "no_such_module:B", "-a", "app", "-s", "s"], "there is no module"),
        (["--processor", "nothing.py", "-a", "app", "-s", "s"], "nothing.py does not exist"),
    ],
)
def test_options_that_contradict_each_other(options, sentence):
    result = CliRunner().invoke(app, ["worker", *options])
    text = result.output + str(result.exception or "")
    assert result.exit_code != 0
    assert sentence in " ".join(text.split())


def test_a_script_is_run_by_a_worker_only(tmp_path):
    with pytest.raises(SettingsError, match="this script is run by a worker"):
        kcl.KCLProcess(object()).run()
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(SettingsError, match="has not called KCLProcess"):
        script_processor(tmp_path / "empty.py")()


def test_each_shard_has_its_own_run_of_the_script(tmp_path):
    """As a process for each shard: what the module keeps is not shared."""
    (tmp_path / "own.py").write_text(
        "from kcl_pipeline.processors.kclpy import kcl\n"
        "kept = []\n"
        "class P(kcl.RecordProcessorBase):\n"
        "    kept = kept\n"
        "kcl.KCLProcess(P()).run()\n"
    )
    make = script_processor(tmp_path / "own.py")
    first, second = make(), make()
    assert first.kept is not second.kept


# -- versions 1 and 2


def first_version(log):
    class First(kcl.RecordProcessorBase):
        def initialize(self, shard_id):
            log.append(("initialize", shard_id))

        def process_records(self, records, checkpointer):
            log.extend(("record", record.get("data")) for record in records)
            checkpointer.checkpoint(records[-1]["sequenceNumber"])

        def shutdown(self, checkpointer, reason):
            log.append(("shutdown", reason))
            try:
                checkpointer.checkpoint()
            except kcl.CheckpointError as error:
                log.append(("refused", error.value))

        def shutdown_requested(self, checkpointer):
            log.append(("shutdown_requested", ""))
            checkpointer.checkpoint()

    return First


def second_version(log):
    class Second(v2.RecordProcessorBase):
        def initialize(self, initialize_input):
            log.append(("initialize", initialize_input.shard_id))

        def process_records(self, process_records_input):
            given = process_records_input
            log.extend(("record", record.data) for record in given.records)
            given.checkpointer.checkpoint(given.records[-1].sequence_number)

        def shutdown(self, shutdown_input):
            log.append(("shutdown", shutdown_input.reason))
            try:
                shutdown_input.checkpointer.checkpoint()
            except checkpoint_error.CheckpointError as error:
                log.append(("refused", error.value))

        def shutdown_requested(self, shutdown_requested_input):
            log.append(("shutdown_requested", ""))
            shutdown_requested_input.checkpointer.checkpoint()

    return Second


@pytest.mark.parametrize("version", [first_version, second_version])
def test_versions_1_and_2(version):
    log = []
    world = World(shards=1, buffered=True, processor=version(log))
    world.put(*numbered(2))
    world.run(5)
    assert log == [
        ("initialize", "shardId-000000000000"),
        ("record", "cjAwMDA="),
        ("record", "cjAwMDE="),
    ]
    assert row_of(world).checkpoint.sequence_number.isdigit()
    world.model.call(
        "SplitShard",
        StreamName="orders",
        ShardToSplit="shardId-000000000000",
        NewStartingHashKey=str(2**127),
    )
    world.run(10)
    assert ("shutdown", "TERMINATE") in log
    assert row_of(world).ended
    log.clear()
    world.worker.shut_down(Background(world.clock), StopReason.STOPPED)
    end = [("shutdown", "ZOMBIE"), ("refused", "ShutdownException")]
    assert log == [("shutdown_requested", "")] * 2 + end * 2


def test_an_error_of_a_kclpy_processor_does_not_repeat_the_records():
    calls = []

    class Raises(v3.RecordProcessorBase):
        def process_records(self, process_records_input):
            calls.append([record.binary_data for record in process_records_input.records])
            raise ValueError("boom")

    world = World(shards=1, buffered=True, processor=Raises)
    world.put(b"a")
    world.run(5)
    world.put(b"b")
    world.run(5)
    assert calls == [[b"a"], [b"b"]]


def test_the_names_of_the_modules():
    assert kcl.CheckpointError is checkpoint_error.CheckpointError
    assert {"ProcessRecordsInput", "Record", "ShutdownInput"} <= set(messages.__all__)
    assert v3.RecordProcessorBase.version == 3
