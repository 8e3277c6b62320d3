"""The pipeline of a replay: another application with the same transform."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from kcl_pipeline import DeltaSink, KinesisPipeline, StreamConfig
from kcl_pipeline.control.replay import replay_pipeline
from kcl_pipeline.leases.application import REPLAY, ReplayRecord

RECORD = ReplayRecord(1_000_000_000, 2_000_000_000)
ORIGINAL = KinesisPipeline(
    name="orders",
    streams=[StreamConfig("one", initial_position="LATEST"), "two"],
    transform_arrow=lambda records: records,
    sink=DeltaSink("table", partition_by=["day"], dead_letter_uri="letters"),
    settings_overrides={
        "lease_table": {"table_name": "its-leases", "deletion_protection_enabled": True},
        "worker_metrics_table": {"table_name": "its-workers"},
        "coordinator_state_table": {"table_name": "its-state", "tags": {"team": "orders"}},
        "assignment": {"max_leases_for_worker": 1, "max_leases_for_group": 1},
        "shard_sync": {"initial_position_in_stream": "LATEST"},
        "retrieval": {"retrieval_mode": "fan_out", "consumer_name": "c", "max_records": 77},
        "metrics": {"metrics_backends": ["prometheus"]},
        "batch": {"failed_records": "skip"},
    },
)


def test_it_shares_no_table_and_no_limit_with_the_pipeline():
    settings = replay_pipeline(ORIGINAL, "orders-replay-1", RECORD, ("one",)).settings
    assert settings.application_name == "orders-replay-1"
    assert settings.lease_table_name == "orders-replay-1"
    assert settings.worker_metrics_table_name == "orders-replay-1-WorkerMetricStats"
    assert settings.coordinator_state_table_name == "orders-replay-1-CoordinatorState"
    assert not settings.lease_table.deletion_protection_enabled
    assert settings.coordinator_state_table.tags == {"team": "orders"}
    assert settings.assignment.max_leases_for_worker == 2**31 - 1
    assert settings.assignment.max_leases_for_group == 2**31 - 1
    assert settings.metrics.metrics_backends == ()
    assert settings.batch.failed_records == "skip"


def test_it_reads_the_range_of_every_stream_by_polling():
    settings = replay_pipeline(ORIGINAL, "orders-replay-1", RECORD, ("one", "two")).settings
    assert settings.streams == ("one", "two")
    assert settings.stream_settings == {}
    assert settings.shard_sync.initial_position_in_stream == "AT_TIMESTAMP"
    assert settings.shard_sync.initial_timestamp == RECORD.begin - timedelta(seconds=60)
    retrieval = settings.retrieval
    assert (retrieval.arrived_from, retrieval.arrived_before) == (RECORD.begin, RECORD.end)
    assert (retrieval.retrieval_mode, retrieval.consumer_name) == ("polling", None)
    assert retrieval.max_records == 77


def test_a_replay_of_dead_letters_reads_no_range_and_lets_all_records_fail_again():
    settings = replay_pipeline(
        ORIGINAL, "orders-replay-1", RECORD, ("dead-letters",), of_letters=True
    ).settings
    retrieval, batch = settings.retrieval, settings.batch
    assert (retrieval.arrived_from, retrieval.arrived_before) == (None, None)
    assert retrieval.fetch_on == "driver"
    assert (batch.failed_records, batch.max_dead_letter_share) == ("dead_letter", 1.0)
    assert batch.max_batch_records == batch.max_dead_letters_per_batch == 10_000


def test_the_side_table_is_like_the_table():
    assert replay_pipeline(ORIGINAL, "o-r", RECORD, ("one",)).sink == ORIGINAL.sink
    side = replay_pipeline(ORIGINAL, "o-r", replace(RECORD, into="side"), ("one",)).sink
    assert (side.uri, side.partition_by) == ("side", ("day",))
    assert side.dead_letters.endswith("/side_dead_letters")


def test_a_record_is_read_as_it_was_written():
    for record in (
        RECORD,
        replace(RECORD, into="side", only_stream="one", complete=True),
    ):
        assert REPLAY.parsed(REPLAY.text(record)) == record
