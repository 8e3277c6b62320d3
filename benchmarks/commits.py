"""Concurrent writers of one Delta table: batches per second and commit times.

Single commits (`alone`) are compared with combined commits (`combined`, the default). Every writer
writes a Parquet file of 100 rows and commits it with the positions of two shards of its own. It
repeats this until the time of the cell is over. At the end the log is read. Every file that a
writer committed must be in the log exactly once.

`log_growth` measures how long a new reader takes to read the positions of 64 shards, and a single
writer to commit, as the log grows. `one_by_one_ms` is the time of delta-rs for their transactions.

With `--store s3` the tables are on the S3 of the embedded AWS: each request takes 20 ms more, and a
few of them time out after their effect, are answered 503, or find expired credentials. A writer
repeats a commit whose outcome is unknown, as a worker does. `ratio` compares the largest number of
writers with the smallest one.

    python -m benchmarks.commits [--store local] [--seconds 12] [--writers 1 4 16 32]
    [--versions 10 1000 3000] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import boto3
import pyarrow as pa
from deltalake import DeltaTable

from kcl_pipeline.batch import Batch
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.object_store import open_storage
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink, transaction_names
from kcl_pipeline.delta.storage import table_root
from kcl_pipeline.errors import SinkError
from kcl_pipeline.local import EmbeddedAws, FaultRule
from kcl_pipeline.position import NOTHING_STORED, Position

STREAM = "arn:aws:kinesis:us-east-1:111122223333:stream/orders/1760000000"
WAYS = ("alone", "combined")
SCHEMA = pa.schema([("id", pa.int64()), ("data", pa.binary())])


BUCKET = "commits"
LATENCY_SECONDS = 0.02
FAULTS = (
    FaultRule(service="s3", kind="delay", delay_seconds=LATENCY_SECONDS),
    FaultRule(service="s3", kind="drop_after", probability=0.002),
    FaultRule(service="s3", kind="throttle", probability=0.002),
    FaultRule(service="s3", kind="deny", code="ExpiredToken", probability=0.001),
)
_MOST_ATTEMPTS = 50

_Result = TypeVar("_Result")


def repeated(call: Callable[[], _Result]) -> _Result:
    """Call until the store works, as a worker does."""
    for attempt in range(_MOST_ATTEMPTS):
        try:
            return call()
        except SinkError:
            time.sleep(min(0.05 * 2**attempt, 1.0))
    return call()


def write_until(
    uri: str, options: Mapping[str, str], worker: int, way: str, seconds: float, start: Any
) -> tuple[list[str], list[float]]:
    """Run one writer and return its committed files and the milliseconds of each commit."""
    settings = DeltaSink(uri, storage_options=options, combined_commits=way != "alone")
    sink = DeltaCommitter(settings, "bench")
    writer = ArrowBatchWriter(None, uri, storage_options=options)
    rows = pa.table(
        {"id": pa.array(range(100), pa.int64()), "data": pa.array([bytes(100)] * 100, pa.binary())},
        schema=SCHEMA,
    )
    keys = [f"{STREAM}/{worker}-{name}" for name in "xy"]
    repeated(sink.check)
    found = repeated(lambda: sink.positions(keys))
    stored = dict(found.shards)
    start.wait()
    began, paths, millis, turn = time.perf_counter(), [], [], 0
    while time.perf_counter() - began < seconds:
        turn += 1
        batch = Batch(f"{worker}-{turn}", (), rows)
        written = repeated(partial(writer.write, batch))
        end = Position(str(10**55 + turn))
        becomes = {key: one.moved(end) for key, one in stored.items()}
        before = time.perf_counter()
        files, schema = written.written_files, written.output_schema
        outcome = repeated(partial(sink.commit, found.table_id, files, stored, becomes, schema))
        millis.append((time.perf_counter() - before) * 1000)
        if outcome.version is None:
            raise AssertionError(f"refused {outcome.refused} on leases that nobody else has")
        paths += [file.path for file in files]
        stored = becomes
    return paths, millis


def _child(queue: Any, *arguments: Any) -> None:
    queue.put(write_until(*arguments))


def run_cell(
    uri: str,
    options: Mapping[str, str],
    set_faults: Callable[[bool], None],
    writers: int,
    way: str,
    seconds: float,
) -> dict[str, float]:
    """Measure one cell of the result on a new table."""
    creator = DeltaCommitter(DeltaSink(uri, storage_options=options), "bench")
    repeated(lambda: creator.ensure(SCHEMA))
    context = multiprocessing.get_context("spawn")
    queue, start = context.Queue(), context.Barrier(writers)
    processes = [
        context.Process(target=_child, args=(queue, uri, options, worker, way, seconds, start))
        for worker in range(writers)
    ]
    set_faults(True)
    for process in processes:
        process.start()
    results = [queue.get(timeout=seconds + 300) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    set_faults(False)
    added, biggest = read_log(uri, options)
    promised = [path for paths, _ in results for path in paths]
    millis = sorted(value for _, values in results for value in values)
    return {
        "batches_per_s": round(len(promised) / seconds, 1),
        "p50_ms": round(statistics.median(millis), 1),
        "p99_ms": round(millis[min(len(millis) - 1, int(len(millis) * 0.99))], 1),
        "biggest": biggest,
        "missing": len(set(promised) - set(added)),
        "repeated": sum(count - 1 for count in added.values()) + len(set(added) - set(promised)),
    }


def log_growth(uri: str, versions: Sequence[int], leases: int = 64) -> dict[str, dict[str, float]]:
    """Return milliseconds at several log lengths, each the median over 25 versions."""
    sink = DeltaCommitter(DeltaSink(uri), "bench")
    sink.ensure(SCHEMA)
    writer = ArrowBatchWriter(None, uri)
    rows = pa.table(
        {"id": pa.array(range(100), pa.int64()), "data": pa.array([bytes(100)] * 100, pa.binary())},
        schema=SCHEMA,
    )
    keys = [f"{STREAM}/lease-{number}" for number in range(leases)]
    table_id, transactions = (
        sink.positions([]).table_id,
        [transaction_names(f"bench/{k}")[0] for k in keys],
    )
    results: dict[str, dict[str, list[float]]] = {}
    stored = NOTHING_STORED
    for turn in range(1, max(versions) + 26):
        becomes = stored.moved(Position(str(turn)))
        written = writer.write(Batch(f"g-{turn}", (), rows))
        cell = next((start for start in versions if start <= turn < start + 25), None)
        committed = _millis(
            sink.commit,
            table_id,
            written.written_files,
            {keys[0]: stored},
            {keys[0]: becomes},
            written.output_schema,
        )
        stored = becomes
        if cell is not None:
            reader = DeltaCommitter(DeltaSink(uri), "bench")
            samples = results.setdefault(
                str(cell), {"numbers_ms": [], "commit_ms": [], "one_by_one_ms": []}
            )
            samples["numbers_ms"].append(_millis(reader.positions, keys))
            samples["commit_ms"].append(committed)
            if turn % 8 == 0:
                table = DeltaTable(uri)
                samples["one_by_one_ms"].append(
                    _millis(list, map(table.transaction_version, transactions))
                )
    return {
        cell: {name: round(statistics.median(values), 1) for name, values in samples.items()}
        for cell, samples in results.items()
    }


def _millis(call: Callable[..., object], *arguments: object) -> float:
    before = time.perf_counter()
    call(*arguments)
    return (time.perf_counter() - before) * 1000


def read_log(uri: str, options: Mapping[str, str]) -> tuple[Counter[str], int]:
    """Return how often each file was added, and the highest number of files in one commit."""
    added: Counter[str] = Counter()
    biggest = 0
    storage = open_storage(table_root(uri), options)
    for stored in storage.list("_delta_log"):
        if not stored.path.endswith(".json"):
            continue
        paths = [
            line["add"]["path"]
            for text in storage.read(stored.path).splitlines()
            if "add" in (line := json.loads(text))
        ]
        added.update(paths)
        biggest = max(biggest, len(paths))
    return added, biggest


@contextmanager
def tables_of(store: str) -> Iterator[tuple[str, dict[str, str], Callable[[bool], None]]]:
    """Return the root of the tables, their storage options, and what turns the faults on or off."""
    if store == "local":
        with tempfile.TemporaryDirectory() as folder:
            yield folder, {}, lambda _: None
        return
    keys: Any = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
    with EmbeddedAws() as aws:
        boto3.client("s3", endpoint_url=aws.endpoint_url, **keys).create_bucket(Bucket=BUCKET)
        options = {
            "AWS_ENDPOINT_URL": aws.endpoint_url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
        }
        yield (
            f"s3://{BUCKET}",
            options,
            lambda are_on: aws.fault_rules.replace([*FAULTS] if are_on else []),
        )


def main() -> None:
    """Print the results as a table, or as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=("local", "s3"), default="local")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--versions", type=int, nargs="*", default=[10, 1000, 3000])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results: dict[str, Any] = {way: {} for way in WAYS}
    with tables_of(arguments.store) as (root, options, set_faults):
        for writers in arguments.writers:
            for way in WAYS if arguments.store == "local" else WAYS[1:]:
                uri = f"{root}/{way}-{writers}"
                cell = run_cell(uri, options, set_faults, writers, way, arguments.seconds)
                results[way][str(writers)] = cell
                if not arguments.json:
                    print(
                        f"{way:>9} {writers:>3} writers: "
                        + ", ".join(f"{key} {value}" for key, value in cell.items()),
                        flush=True,
                    )
        if arguments.versions and arguments.store == "local":
            growth = results["log_growth"] = log_growth(f"{root}/growth", arguments.versions)
            if not arguments.json:
                print(
                    "\n".join(
                        f"log of {version:>5} versions: {cell}" for version, cell in growth.items()
                    )
                )
    results |= {
        key: sum(cell[key] for way in WAYS for cell in results[way].values())
        for key in ("missing", "repeated")
    }
    rates = [cell["batches_per_s"] for cell in results["combined"].values()]
    results["ratio"] = round(rates[-1] / max(rates[0], 0.1), 2)
    if arguments.json:
        print(json.dumps(results))
    else:
        print(f"missing {results['missing']}, repeated {results['repeated']}, ", end="")
        print(f"{arguments.writers[-1]} writers / {arguments.writers[0]}: {results['ratio']}")


if __name__ == "__main__":
    main()
