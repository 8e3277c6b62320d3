"""Limits of what is read from the tables: at the limit a row is read, beyond it it is not."""

from __future__ import annotations

import pytest

from kcl_pipeline.config import LeaderSettings
from kcl_pipeline.errors import UnreadableRowError
from kcl_pipeline.leases.coordinator import lock_from_item
from kcl_pipeline.leases.row import (
    MAX_COUNTER,
    MAX_RELATED_SHARDS,
    MAX_THROUGHPUT_KBPS,
    lease_from_item,
    lease_to_item,
)
from kcl_pipeline.leases.workers import worker_from_item
from kcl_pipeline.text import printable

KEY = "shardId-000000000001"
STREAM_KEY = "123456789012:orders:1700000000"
GOOD = {
    "leaseKey": {"S": KEY},
    "leaseCounter": {"N": "3"},
    "ownerSwitchesSinceCheckpoint": {"N": "0"},
    "checkpoint": {"S": "TRIM_HORIZON"},
}


def ids(count: int) -> list[str]:
    return [f"shardId-{number}" for number in range(count)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("leaseCounter", {"N": str(MAX_COUNTER)}),
        ("leaseCounter", {"N": str(10**18)}),
        ("leaseCounter", {"N": "1E+18"}),
        ("checkpoint", {"S": "9" * 129}),
        ("checkpoint", {"S": "007"}),
        ("pendingCheckpoint", {"S": ""}),
        ("leaseOwner", {"S": "é" * 1024}),
        ("leaseOwner", {"S": "[/x] 漢字"}),
        ("throughputKBps", {"N": str(MAX_THROUGHPUT_KBPS)}),
        ("throughputKBps", {"N": "1E-130"}),
        ("childShardIds", {"SS": ids(MAX_RELATED_SHARDS)}),
        ("parentShardId", {"S": "not a set: absent, as in KCL"}),
        ("pendingCheckpointState", {"N": "0"}),
        ("unknown", {"L": [{"M": {}}]}),
        ("unknown", {"S": "x" * 379_000}),
    ],
)
def test_a_row_at_the_limit_is_read(name: str, value: dict) -> None:
    assert lease_from_item({**GOOD, name: value}).lease_key == KEY


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("leaseKey", {"S": "x:y"}),
        ("leaseKey", {"S": "shard 1"}),
        ("leaseKey", {"S": "s" * 129}),
        ("leaseKey", {"S": f"{'1' * 21}:orders:1:{KEY}"}),
        ("leaseKey", {"S": f"1:or ders:1:{KEY}"}),
        ("streamName", {"S": "orders"}),
        ("leaseCounter", {"N": str(MAX_COUNTER + 1)}),
        ("leaseCounter", {"N": str(2**63 - 2)}),
        ("leaseCounter", {"N": "-1"}),
        ("leaseCounter", {"N": "1.5"}),
        ("leaseCounter", {"N": "NaN"}),
        ("leaseCounter", {"N": "1E+999999999"}),
        ("leaseCounter", {"N": "9" * 4301}),
        ("leaseCounter", {"N": "1_0"}),
        ("leaseCounter", {"S": "3"}),
        ("ownerSwitchesSinceCheckpoint", {"N": str(2**64)}),
        ("checkpoint", {"S": "9" * 130}),
        ("checkpoint", {"S": "9" * 4301}),
        ("checkpoint", {"S": "SHARD_END\n"}),
        ("checkpointSubSequenceNumber", {"N": str(2**63)}),
        ("pendingCheckpoint", {"S": "9" * 4301}),
        ("leaseOwner", {"S": "a\nb"}),
        ("leaseOwner", {"S": "\x1b[2J"}),
        ("leaseOwner", {"S": "\ud800"}),
        ("leaseOwner", {"S": "\u202etxt"}),
        ("leaseOwner", {"S": "w" * 2049}),
        ("checkpointOwner", {"S": "\x00"}),
        ("parentShardId", {"SS": ids(MAX_RELATED_SHARDS + 1)}),
        ("childShardIds", {"SS": ["a b"]}),
        ("childShardIds", {"SS": [7]}),
        ("startingHashKey", {"S": "1"}),
        ("unknown", {"S": "x" * 380_000}),
        ("unknown", {"S": "\ud800" * 127_000}),
        ("unknown", {"L": [{"M": {"x": {"B": b"x" * 1_000}}}] * 380}),
        ("throughputKBps", {"N": "-1"}),
        ("throughputKBps", {"N": "1E+125"}),
        ("throughputKBps", {"N": "1E+400"}),
    ],
)
def test_a_row_beyond_the_limit_is_unreadable_and_named(name: str, value: dict) -> None:
    with pytest.raises(UnreadableRowError) as refused:
        lease_from_item({**GOOD, name: value})
    said = str(refused.value)
    assert said.startswith("the row ")
    assert said.isprintable()
    assert len(said) < 800
    assert "leaseKey" not in name or "leaseKey" in said


@pytest.mark.parametrize(("start", "end"), [("0", "9" * 40), ("-1", "5"), ("5", "5"), ("6", "5")])
def test_a_hash_range_has_128_bits_and_an_order(start: str, end: str) -> None:
    with pytest.raises(UnreadableRowError, match="hash"):
        lease_from_item({**GOOD, "startingHashKey": {"S": start}, "endingHashKey": {"S": end}})


def test_a_multi_stream_row_says_the_same_stream_twice() -> None:
    row = {**GOOD, "leaseKey": {"S": f"{STREAM_KEY}:{KEY}"}, "streamName": {"S": STREAM_KEY}}
    lease = lease_from_item(row)
    assert lease.stream == STREAM_KEY
    assert lease_from_item(lease_to_item(lease)) == lease
    with pytest.raises(
        UnreadableRowError, match="streamName is '1:other:2', but the key has another stream"
    ):
        lease_from_item({**row, "streamName": {"S": "1:other:2"}})


@pytest.mark.parametrize("duration", ["0", "-5", "600001", "9" * 30, "1e3", "٣", "", " 1000"])
def test_a_lock_lasts_from_a_millisecond_to_ten_minutes(duration: str) -> None:
    lock = {"ownerName": {"S": "a"}, "recordVersionNumber": {"S": "v"}}
    with pytest.raises(UnreadableRowError, match="the row Leader"):
        lock_from_item({**lock, "leaseDuration": {"S": duration}})
    assert lock_from_item({**lock, "leaseDuration": {"S": "600000"}}).owner_name == "a"
    with pytest.raises(ValueError, match="less than or equal to 600000"):
        LeaderSettings(leader_lease_duration_millis=600_001)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wid", {"S": "\x1b[2J"}),
        ("lut", {"N": "1E+30"}),
        ("sts", {"M": {"C": {"L": [{"N": "1"}] * 101}}}),
        ("sts", {"M": {str(n): {"L": []} for n in range(33)}}),
        ("sts", {"M": {"C\n": {"L": []}}}),
        ("sts", {"M": {"C": {"L": [{"N": "1E+125"}]}}}),
        ("sts", {"M": {"C": {"L": [{"N": "-2"}]}}}),
        ("opr", {"M": {"C": {"L": [{"N": "NaN"}]}}}),
        ("kclpRunId", {"S": "a\tb"}),
        ("kclpReplaces", {"S": "a\tb"}),
        ("kclpFormerRun", {"S": "a\tb"}),
        ("kclpFormerEnded", {"N": "253402300800000"}),
        ("kclpCpu", {"L": [{"N": "1"}] * 101}),
        ("kclpCpu", {"L": [{"N": "-2"}]}),
    ],
)
def test_a_worker_row_beyond_the_limit_is_unreadable(name: str, value: dict) -> None:
    row = {"wid": {"S": "w"}, "lut": {"N": "1"}}
    assert worker_from_item(row, "wid").worker_id == "w"
    with pytest.raises(UnreadableRowError, match="the row "):
        worker_from_item({**row, name: value}, "wid")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text", "plain text"),
        ("a\nb\x1b[2J", "a\\nb\\x1b[2J"),
        ("\ud800\u202e", "\\ud800\\u202e"),
        ("x" * 201, "x" * 200 + "... (201 characters)"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown
