"""What a worker's row says of its shards."""

from __future__ import annotations

import pytest

from benchmarks.capacity import size_of
from kcl_pipeline.leases.row import string
from kcl_pipeline.leases.workers import STATUS, WorkerMetrics, worker_attributes
from kcl_pipeline.testing.tables import InMemoryWorkerMetricsTable
from kcl_pipeline.version import __version__
from kcl_pipeline.worker_status import (
    MAX_LAGS,
    MAX_PAUSED,
    MAX_STREAMS,
    HungState,
    LeaseLag,
    PausedLease,
    StreamLag,
    UnavailableStream,
    WorkerStatus,
    WorkerTotals,
    lags_by_stream,
    lags_of,
    status_of,
    status_text,
)
from tests.support.worker_world import World, numbered

PAUSE = PausedLease("shardId-1", "the transform fails", 12.5)


def stored(lags: dict[str, int]) -> WorkerStatus:
    return status_of(status_text(WorkerStatus(lags=lags_of(lags))))


@pytest.mark.parametrize(
    "status",
    [
        WorkerStatus(),
        WorkerStatus(0),
        WorkerStatus(2**40, 3, (PAUSE, PAUSE), 2),
        WorkerStatus(5, lags=(LeaseLag("shardId-1", 5), LeaseLag("shardId-2", 0))),
        WorkerStatus(failed_batches=3, failure="SinkError: refused"),
        WorkerStatus(unavailable=()),
        WorkerStatus(totals=WorkerTotals(), version="0.2.0", more_lags=80, more_lags_millis=12),
        WorkerStatus(totals=WorkerTotals(61.5, 2**40, 2**50, 9, 8, 7, 6, 5)),
        WorkerStatus(
            last_batch_seconds=0.5,
            commit_millis_p99=1_200,
            put_to_commit_millis_p99=2_500,
            table_version=77,
        ),
        WorkerStatus(unavailable=(UnavailableStream("clicks", "it does not exist"),)),
        WorkerStatus(hung=HungState("writing", 900.5, 3)),
    ],
)
def test_a_status_comes_back_as_it_was(status: WorkerStatus):
    assert status_of(status_text(status)) == status
    table = InMemoryWorkerMetricsTable()
    table.report(WorkerMetrics("w-1", 1, status=status))
    assert table.scan_workers().workers == (WorkerMetrics("w-1", 1, status=status),)


def test_what_is_written_is_bounded():
    long = PausedLease("shardId-1", "\n\x1b[0m" * 1_000, 1.0)
    lags = lags_of({f"shardId-{number}": 60_000 + number for number in range(50)})
    failure = "\x1b" * 5_000
    text = status_text(WorkerStatus(49, 0, (long,) * 50, 50, lags, failure=failure))
    assert len(text) < 30_000
    found = status_of(text)
    assert (len(found.paused), found.paused_leases) == (MAX_PAUSED, 50)
    assert found.paused[0].reason.isprintable()
    assert found.failure is not None
    assert found.failure.isprintable()
    assert [one.millis for one in found.lags] == list(range(60_049, 60_049 - MAX_LAGS, -1))


def test_what_a_row_does_not_have_is_zero_and_what_is_new_is_ignored():
    older = status_of('{"lagMillis": 5, "lags": [{"leaseKey": "s", "millis": 5}]}')
    assert (older.totals, older.version, older.more_lags) == (WorkerTotals(), None, 0)
    newer = status_of('{"lagMillis": 5, "totals": {"records": 3, "new": 1}, "alsoNew": {}}')
    assert newer.totals == WorkerTotals(records=3)


def test_lags_that_are_left_out_are_counted_with_their_median():
    found = stored({f"shardId-{number}": 60_000 + number for number in range(50)})
    assert (len(found.lags), found.more_lags, found.more_lags_millis) == (MAX_LAGS, 30, 60_014)
    found = stored({"shardId-1": 1})
    assert (found.more_lags, found.more_lags_millis) == (0, None)


def test_what_the_lease_rows_or_the_process_have_is_not_in_the_row():
    given = WorkerStatus(5, memory_bytes=7, memory_limit_bytes=9, positions={"shardId-1": "4"})
    assert status_of(status_text(given)) == WorkerStatus(5)


def test_progress_is_the_difference_of_two():
    before = WorkerStatus(9, totals=WorkerTotals(10.0, records=4, batches=1, handoffs=1))
    now = WorkerStatus(3, totals=WorkerTotals(70.0, records=9, batches=3, handoffs=1))
    assert now.since(before) == WorkerStatus(3, totals=WorkerTotals(60.0, records=5, batches=2))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"lagMillis": -1}',
        '{"lagMillis": 1.5}',
        '{"lagMillis": 18446744073709551616}',
        '{"paused": [{"leaseKey": "", "reason": "", "seconds": 1}]}',
        '{"paused": ' + str([0] * 21) + "}",
        "[" * 100_000,
        '{"unknownLags": "' + "9" * 70_000 + '"}',
        '{"lags": [{"leaseKey": "s", "millis": -1}]}',
        '{"totals": {"deadLetters": -1}}',
        '{"totals": {"records": -1}}',
        '{"totals": {"seconds": -0.5}}',
        '{"totals": {"batches": 18446744073709551616}}',
        '{"totals": []}',
        '{"version": "' + "9" * 65 + '"}',
        '{"moreLags": -1}',
        '{"failure": "' + "x" * 500 + '"}',
    ],
)
def test_a_status_beyond_its_limits_makes_the_row_unusable_and_the_next_report_repairs_it(
    text: str,
):
    with pytest.raises(ValueError, match="status"):
        status_of(text)
    table = InMemoryWorkerMetricsTable()
    table.report(WorkerMetrics("w-1", 1, status=WorkerStatus(1)))
    item = table.store.get("w-1", consistent=True)
    table.store.put(item | {STATUS: string(text or " ")}, [])
    listing = table.scan_workers()
    assert listing.workers == ()
    assert [row.key for row in listing.bad_rows] == ["w-1"]
    table.report(WorkerMetrics("w-1", 2, status=WorkerStatus(2)))
    assert table.scan_workers().workers[0].status == WorkerStatus(2)


def test_a_worker_reports_its_lag_and_its_paused_shards():
    def broken(_table):
        raise ValueError("broken")

    world = World(shards=1, transform=broken, buffered=True)
    world.put(*numbered(40))
    world.run(40)
    (row,) = world.rows.scan_workers().workers
    assert row.status is not None
    assert row.status.paused_leases == 1
    (pause,) = row.status.paused
    assert pause.lease_key == "shardId-000000000000"
    assert "ValueError: broken" in pause.reason
    assert pause.seconds > 20
    assert row.status.lag_millis is not None
    assert row.status.lag_millis > 20_000
    assert row.status.lags == (LeaseLag("shardId-000000000000", row.status.lag_millis),)
    world.writer.transform = None
    world.run(80)
    (row,) = world.rows.scan_workers().workers
    lags = (LeaseLag("shardId-000000000000", 0),)
    assert row.status is not None
    assert row.status.totals.records == 40
    assert row.status.last_batch_seconds is not None
    expected = WorkerStatus(
        0,
        lags=lags,
        unavailable=(),
        totals=row.status.totals,
        version=__version__,
        read_leases=1,
        last_batch_seconds=row.status.last_batch_seconds,
        commit_millis_p99=row.status.commit_millis_p99,
        put_to_commit_millis_p99=row.status.put_to_commit_millis_p99,
        table_version=row.status.table_version,
    )
    assert row.status == expected


def test_a_worker_reports_its_dead_letters():
    def picky(table):
        bad = [b for b in table["data"].to_pylist() if b.endswith(b"7")]
        if bad:
            raise ValueError(f"bad record {bad[0]!r}")
        return table

    world = World(shards=1, transform=picky, buffered=True)
    world.put(*numbered(40))
    world.run(40)
    (row,) = world.rows.scan_workers().workers
    assert row.status is not None
    assert (row.status.totals.dead_letters, row.status.failed_batches) == (4, 0)


def test_a_worker_reports_what_it_committed_since_it_started():
    world = World(shards=1, buffered=True)
    world.put(*numbered(40))
    world.run(40)
    (row,) = world.rows.scan_workers().workers
    assert row.status is not None
    totals = row.status.totals
    assert (totals.records, totals.rows) == (40, 40)
    assert totals.batches >= 1
    assert totals.bytes > 0
    assert 0 < totals.seconds <= 41
    assert row.status.last_batch_seconds is not None
    assert row.status.commit_millis_p99 is not None
    assert row.status.put_to_commit_millis_p99 is not None
    assert row.status.version == __version__


def test_the_lag_of_each_stream_is_that_of_its_worst_shard():
    millis = {"1:a:5:s-0": 10, "1:a:5:s-1": 30, "1:b:5:s-0": 40, "s-0": 99}
    found = lags_by_stream(millis, ["1:c:5:s-0", "1:c:5:s-1", "1:a:5:s-2", "s-1"])
    assert found == (
        StreamLag("1:b:5", 40),
        StreamLag("1:a:5", 30, 1),
        StreamLag("1:c:5", None, 2),
    )
    status = WorkerStatus(streams=found)
    assert status_of(status_text(status)) == status
    many = lags_by_stream({f"1:{number}:5:s-0": number for number in range(150)}, ())
    assert len(many) == MAX_STREAMS
    assert (many[0].millis, many[-1].millis) == (149, 50)


def test_small_lags_are_fewer_so_that_a_row_costs_one_wcu():
    small = {f"shardId-{number:012d}": 9_900 + number for number in range(100)}
    found = stored(small)
    assert [one.millis for one in found.lags] == list(range(9_999, 9_989, -1))
    assert (found.more_lags, found.more_lags_millis) == (90, 9_944)
    mixed = small | {f"shardId-{number:012d}": 900_000 + number for number in range(12)}
    found = stored(mixed)
    assert [one.millis for one in found.lags] == list(range(900_011, 899_999, -1))
    assert found.more_lags == 88
    totals = WorkerTotals(86_400.5, 10**9, 10**12, 10**9, 10**6, refused_batches=12, handoffs=40)
    status = WorkerStatus(
        9_999,
        lags=lags_of(small),
        totals=totals,
        version="0.10.10",
        last_batch_seconds=1.4,
        commit_millis_p99=85,
        put_to_commit_millis_p99=912,
        table_version=10**6,
    )
    row = WorkerMetrics(
        "orders-12345678",
        1_795_616_694,
        stats={"C": (99.25,) * 10},
        operating_range={"C": (80,)},
        run_id="2e84662b-fc3c-420a-9c82-d7bf4d95a5d5",
        status=status,
    )
    assert size_of(worker_attributes(row)) + len("wid" + row.worker_id) <= 1_024
