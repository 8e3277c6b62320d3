"""Decoding of GetRecords responses into Arrow columns, compared with botocore.

The responses come over HTTP from a replay server. The third mode only receives the bytes.

    python -m benchmarks.decode [--json] [--sizes 1024 100 10240 102400]

One client thread runs the modes in turn. Results are medians of the rounds. The ratios use
processor time, which other load on the machine affects least. Ratios of elapsed time are also
printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import boto3
import pyarrow as pa
import urllib3
from botocore.config import Config

from benchmarks.replay_server import JSON, SIZES, answer_records, replay_server
from kcl_pipeline.batch import RECORD_SCHEMA
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import RetrievalSettings, ShardSyncSettings
from kcl_pipeline.kinesis.boto import BodyFormat, BotoKinesis
from kcl_pipeline.shards import StreamId

STREAM = StreamId("orders")
SHARD = "shardId-000000000000"
Way = Callable[[str], int]


@dataclass(frozen=True)
class Figure:
    """Results of one mode and size: medians over the rounds."""

    records_per_s: float
    mb_per_s: float
    cpu_s_per_gb: float


def raw_way(url: str) -> Way:
    """Receive the bytes and discard them."""
    pool = urllib3.PoolManager()

    def call(iterator: str) -> int:
        body = json.dumps({"ShardIterator": iterator}).encode()
        return len(pool.request("POST", url, body=body, headers={"Content-Type": JSON}).data) and 1

    return call


def client_of(url: str) -> Any:
    return boto3.client(
        "kinesis",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="local",
        aws_secret_access_key="local",
        config=Config(retries={"total_max_attempts": 1}),
    )


def botocore_way(url: str) -> Way:
    """Parse with botocore, as a boto3 user does, then build the same columns."""
    client = client_of(url)

    def call(iterator: str) -> int:
        records = client.get_records(ShardIterator=iterator, Limit=10_000)["Records"]
        columns = [
            pa.array(["orders"] * len(records), pa.string()),
            pa.array([SHARD] * len(records), pa.string()),
            pa.array([r["SequenceNumber"] for r in records], pa.string()),
            pa.array([0] * len(records), pa.int64()),
            pa.array([r["PartitionKey"] for r in records], pa.string()),
            pa.nulls(len(records), pa.string()),
            pa.array([r["Data"] for r in records], pa.binary()),
            pa.array(
                [r["ApproximateArrivalTimestamp"] for r in records], pa.timestamp("us", tz="UTC")
            ),
            pa.array([r.get("EncryptionType") for r in records], pa.string()),
        ]
        return int(pa.Table.from_arrays(columns, schema=RECORD_SCHEMA).num_rows)

    return call


def our_way(url: str, body_format: BodyFormat) -> Way:
    kinesis = BotoKinesis(
        client_of(url),
        RetrievalSettings(),
        ShardSyncSettings(),
        SystemClock(),
        body_format=body_format,
    )
    return lambda iterator: int(
        kinesis.get_records(STREAM, SHARD, iterator, 10_000).records.num_rows
    )


def measure(url: str, size: int, records: int, rounds: int) -> dict[str, Figure]:
    """Return the results of each mode at one size."""
    ways = {
        "raw_body": raw_way(url),
        "botocore": botocore_way(url),
        "ours_json": our_way(url, "json"),
        "ours_cbor": our_way(url, "cbor"),
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            calls = 1 if name == "botocore" else 5
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(calls):
                assert way(str(size)) > 0
            if number > 0:  # the first round warms up
                samples[name].append(
                    ((time.perf_counter() - began) / calls, (time.process_time() - cpu) / calls)
                )
    figures = {}
    for name, pairs in samples.items():
        seconds, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
        megabytes = size * records / 1e6
        figures[name] = Figure(records / seconds, megabytes / seconds, cpu / megabytes * 1000)
    return figures


def run(records: int, rounds: int, sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    """Return the results and their ratios at each size."""
    with replay_server(records, sizes=sizes) as url:
        figures = {
            str(size): measure(url, size, answer_records(size, records), rounds) for size in sizes
        }
        server = urllib3.PoolManager().request("GET", f"{url}/cpu").json()["cpu_s"]
    return {
        "ratio_vs_botocore": {
            size: of["botocore"].cpu_s_per_gb / of["ours_json"].cpu_s_per_gb
            for size, of in figures.items()
        },
        "ratio_vs_botocore_elapsed": {
            size: of["ours_json"].records_per_s / of["botocore"].records_per_s
            for size, of in figures.items()
        },
        "ratio_vs_raw_body": {
            size: of["raw_body"].cpu_s_per_gb / of["ours_json"].cpu_s_per_gb
            for size, of in figures.items()
        },
        "ratio_cbor_vs_json": {
            size: of["ours_json"].cpu_s_per_gb / of["ours_cbor"].cpu_s_per_gb
            for size, of in figures.items()
        },
        "faster_format": {
            size: "json" if of["ours_json"].cpu_s_per_gb <= of["ours_cbor"].cpu_s_per_gb else "cbor"
            for size, of in figures.items()
        },
        "figures": {
            size: {name: asdict(figure) for name, figure in of.items()}
            for size, of in figures.items()
        },
        "server_cpu_s": server,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--records", type=int, default=10_000, help="per answer")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, help="of a record's data, bytes"
    )
    options = parser.parse_args()
    result = run(options.records, options.rounds, tuple(options.sizes))
    if options.json:
        print(json.dumps(result))
        return
    for size, of in result["figures"].items():
        for name, figure in of.items():
            print(
                f"{size:>5} B  {name:<10} {figure['records_per_s']:>12,.0f} records/s "
                f"{figure['mb_per_s']:>8.1f} MB/s {figure['cpu_s_per_gb']:>7.2f} CPU s/GB"
            )
    for name in (
        "ratio_vs_botocore",
        "ratio_vs_botocore_elapsed",
        "ratio_vs_raw_body",
        "ratio_cbor_vs_json",
    ):
        print(
            f"{name}: " + ", ".join(f"{size} B {ratio:.2f}" for size, ratio in result[name].items())
        )
    print(f"faster_format: {result['faster_format']}")


if __name__ == "__main__":
    main()
