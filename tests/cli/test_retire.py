"""`kcl-pipeline do retire` (embedded AWS)."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError

from kcl_pipeline.aws import open_removals
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.leases.application import ApplicationIdentity
from kcl_pipeline.leases.deletion import Presence
from kcl_pipeline.leases.identity_check import ensure_application
from kcl_pipeline.local.faults import FaultRule
from tests.support.announcing import announce
from tests.support.cli_fleet import run, run_json
from tests.support.delta_tables import committer, entry, written

pytest_plugins = ["tests.support.cli_fixtures"]
pytestmark = pytest.mark.usefixtures("environment")

SUFFIXES = ("", "-CoordinatorState", "-WorkerMetricStats")


class Quiet:
    """A fleet whose workers have stopped, with a consumer and announcements."""

    def __init__(self, fleet, folder):
        self.fleet, self.name = fleet, fleet.name
        self.kinesis, self.dynamodb = fleet.clients.kinesis, fleet.clients.dynamodb
        for worker_id in ("blue-1", "blue-2"):
            fleet.tables.workers.deregister(worker_id)
        for lease in fleet.tables.lease.list_leases().leases:
            assert lease.owner is None or fleet.tables.lease.evict(lease)
        assert fleet.tables.coordinator.release_lock(fleet.tables.coordinator.read_lock())
        stream = fleet.kinesis.resolve_stream(self.name, multi_stream=False)
        self.arn = stream.arn
        self.uri = str(folder / "table")
        identity = ApplicationIdentity.of([stream], is_multi_stream=False, sink=f"delta:{self.uri}")
        ensure_application(
            self.name, fleet.tables.coordinator, fleet.tables.lease, identity, lambda: ()
        )
        for name in (self.name, "another-consumer"):
            self.kinesis.register_stream_consumer(StreamARN=self.arn, ConsumerName=name)
        sink = committer(self.uri)
        sink.ensure(written(self.uri, 1).output_schema)
        self.announced = [
            announce(sink, written(self.uri, number).files, entry("y", 1), application=name).name
            for number, name in enumerate((self.name, f"{self.name}-2", "other"))
        ]

    def tables(self):
        names = self.dynamodb.list_tables()["TableNames"]
        return sorted(one.removeprefix(self.name) for one in names if one.startswith(self.name))

    def consumers(self):
        found = self.kinesis.list_stream_consumers(StreamARN=self.arn)["Consumers"]
        return sorted(one["ConsumerName"] for one in found)

    def announcements(self, folder):
        names = {one.name for one in (folder / "table" / "_kcl_pipeline" / "announced").iterdir()}
        return [name.rpartition("/")[2] in names for name in self.announced]


@pytest.fixture
def quiet(fleet, tmp_path):
    return Quiet(fleet, tmp_path)


def test_without_a_confirmation_it_only_shows_the_parts(quiet, tmp_path):
    text = run("do", "retire", "-a", quiet.name).stdout
    for suffix in SUFFIXES:
        assert f"would delete the table {quiet.name}{suffix} (" in text
    assert f"would delete the announcements of the table {quiet.uri} (1 announced batch)" in text
    assert f"would delete the fan-out consumer {quiet.arn}/consumer/{quiet.name}:" in text
    assert f"stays: the Delta table {quiet.uri} with all its rows" in text
    assert "a new application of this name continues after them" in text
    assert f"stays: the dead-letter table, if any ({quiet.uri}_dead_letters unless set)" in text
    assert f"stays: the stream {quiet.arn} and its records" in text
    assert f"dry run; confirm with the name {quiet.name} to delete" in text
    named = run("do", "retire", "-a", quiet.name, "-s", quiet.arn.rpartition("/")[2]).stdout
    assert named.count("stays: the stream ") == 1, "the recorded stream, which has an ARN"
    found = run_json("do", "retire", "-a", quiet.name)
    assert (found["dry_run"], len(found["parts"])) == (True, 5)
    refused = run("do", "retire", "-a", quiet.name, "--confirm", "other", code=1).stderr
    assert f"is not the name of the application '{quiet.name}'; nothing is deleted" in refused
    assert quiet.tables() == sorted(SUFFIXES)
    assert quiet.fleet.tables.coordinator.read_control().pause is None
    assert all(quiet.announcements(tmp_path))


def test_it_says_where_a_new_application_with_positions_in_the_table_begins(quiet):
    text = run("do", "retire", "-a", quiet.name).stdout
    assert "a new application of this name continues after them" in text
    assert "lands once more" not in text


def test_it_deletes_what_belongs_to_the_application_and_twice_is_safe(quiet, tmp_path):
    found = run_json("do", "retire", "-a", quiet.name, "--confirm", quiet.name)
    assert (found["is_complete"], found["is_paused"]) == (True, False)
    assert [one["kind"] for one in found["parts"]] == ["announcements", "consumer", *["table"] * 3]
    assert quiet.tables() == []
    assert quiet.consumers() == ["another-consumer"]
    assert quiet.announcements(tmp_path) == [False, True, True], "those of others stay"
    text = run("do", "retire", "-a", quiet.name, "--confirm", quiet.name).stdout
    assert "nothing was left to delete" in text


@pytest.mark.parametrize("kind", ["drop_before", "drop_after", "throttle", "error500"])
def test_lost_answers_are_repeated(quiet, server, kind):
    server.fault_rules.replace(
        [
            FaultRule(operation=operation, kind=kind, count=2)
            for operation in ("DeleteTable", "DeregisterStreamConsumer", "UpdateItem")
        ]
    )
    assert run_json("do", "retire", "-a", quiet.name, "--confirm", quiet.name)["is_complete"]
    assert (quiet.tables(), quiet.consumers()) == ([], ["another-consumer"])


def test_one_denied_table_is_named_and_the_rest_is_deleted(quiet, server):
    rule = FaultRule(operation="DeleteTable", kind="deny", contains="-WorkerMetricStats")
    server.fault_rules.replace([rule])
    text = run("do", "retire", "-a", quiet.name, "--confirm", quiet.name, code=1).stdout
    assert f"failed the table {quiet.name}-WorkerMetricStats" in text
    assert "the action is dynamodb:DeleteTable" in text
    assert f"kept the table {quiet.name}-CoordinatorState" in text
    assert "the application is still paused" in text
    assert quiet.tables() == ["-CoordinatorState", "-WorkerMetricStats"]
    assert quiet.consumers() == ["another-consumer"]
    server.fault_rules.replace([])
    assert run_json("do", "retire", "-a", quiet.name, "--confirm", quiet.name)["is_complete"]
    assert quiet.tables() == []


def test_deletion_protection_is_shown_and_nothing_is_deleted_while_it_is_on(quiet):
    quiet.dynamodb.update_table(TableName=quiet.name, DeletionProtectionEnabled=True)
    assert "(4 rows; its deletion protection is on)" in run("do", "retire", "-a", quiet.name).stdout
    before = quiet.tables(), quiet.consumers()
    refused = run("do", "retire", "-a", quiet.name, "--confirm", quiet.name, code=1).stderr
    assert f"the deletion protection is on for the tables {quiet.name}; nothing is deleted" in (
        refused
    )
    assert (quiet.tables(), quiet.consumers()) == before
    assert "application_paused" not in run("status", "-a", quiet.name).stdout
    quiet.dynamodb.update_table(TableName=quiet.name, DeletionProtectionEnabled=False)
    assert run_json("do", "retire", "-a", quiet.name, "--confirm", quiet.name)["is_complete"]


def test_in_a_shared_table_only_the_rows_are_deleted(quiet):
    table = f"{quiet.name}-CoordinatorState"
    other = {"key": {"S": "another program"}, "value": {"S": "x"}}
    quiet.dynamodb.put_item(TableName=table, Item=other)
    text = run("do", "retire", "-a", quiet.name).stdout
    assert f"would delete the rows of the application in the table {table} (" in text
    assert "stays: the table" in text
    assert run_json("do", "retire", "-a", quiet.name, "--confirm", quiet.name)["is_complete"]
    assert quiet.tables() == ["-CoordinatorState"]
    assert quiet.dynamodb.scan(TableName=table)["Items"] == [other]


def test_the_table_of_another_program_stays(quiet):
    table = f"{quiet.name}-WorkerMetricStats"
    quiet.dynamodb.delete_table(TableName=table)
    quiet.dynamodb.create_table(
        TableName=table,
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    refused = run("do", "retire", "-a", quiet.name, "--confirm", quiet.name, code=1).stderr
    assert "belongs to another program" in refused
    assert quiet.tables() == sorted(SUFFIXES), "nothing is deleted"


def test_a_table_that_was_created_again_is_not_deleted(quiet):
    clock = SystemClock()
    removals = open_removals(quiet.fleet.settings, quiet.fleet.clients, clock)
    (_, lease), _ = removals.tables()
    found = lease.find()
    assert (found.rows, lease.presence(found)) == (4, Presence.THERE)
    lease.delete(found)
    lease.delete(found)
    assert lease.presence(found) is Presence.GONE
    quiet.fleet.tables.lease.ensure_exists()
    assert lease.presence(found) is Presence.GONE
    consumer = removals.consumers.find(quiet.arn)
    removals.consumers.deregister(consumer)
    removals.consumers.deregister(consumer)
    assert removals.consumers.find(quiet.arn) is None
    assert removals.consumers.arn_of("no-such-stream") is None
    with pytest.raises(ClientError):
        quiet.kinesis.describe_stream_consumer(ConsumerARN=consumer.arn)
