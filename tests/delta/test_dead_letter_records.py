"""The records of a dead-letter table in shards and pages, and the marks of exactly these rows."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.table import TableMerger

from kcl_pipeline.batch import RECORD_SCHEMA
from kcl_pipeline.delta import dead_letters as module
from kcl_pipeline.delta.dead_letters import NO_TABLE, DeadLetterRecords, Selection, mark_records
from kcl_pipeline.errors import SinkError
from tests.support.dead_letters import BASE, NOON, letter, store

LATER = NOON + timedelta(hours=3)
SECOND = timedelta(seconds=1)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "dead")


def opened(uri: str, selection: Selection | None = None, **more: int) -> DeadLetterRecords:
    version = DeltaTable(uri).version()
    return DeadLetterRecords(uri, None, version, selection or Selection(), **more)


def named_by(records: DeadLetterRecords) -> pa.Table:
    """The rows of all pages."""
    pages = [(shard, page) for shard in records.shards for page in shard.pages]
    tables = [records.named(*each) for each in pages]
    return pa.concat_tables(tables) if tables else pa.table({})


def data(found: DeadLetterRecords) -> list[list[list[bytes]]]:
    """The data of all records, by shard and page."""
    return [
        [found.read(shard, page)["data"].to_pylist() for page in shard.pages]
        for shard in found.shards
    ]


def marked(uri: str) -> list[bytes]:
    rows = DeltaTable(uri).to_pyarrow_table().to_pylist()
    return sorted(row["data"] for row in rows if row["replayed_at"] is not None)


def test_records_are_in_the_order_of_their_numbers_and_as_they_were(uri: str) -> None:
    binary = bytes(range(256)) * 8
    store(uri, letter("10"), letter("9", data=binary, explicit_hash_key="7"), letter("9", 1))
    found = opened(uri)
    (shard,) = found.shards
    (page,) = shard.pages
    records = found.read(shard, page)
    assert records.schema == RECORD_SCHEMA
    assert records["data"].to_pylist() == [binary, b"9/1", b"10/0"]
    assert records["explicit_hash_key"].to_pylist() == ["7", None, None]
    assert records["sub_sequence_number"].to_pylist() == [0, 1, 0]
    assert (found.records, found.streams) == (3, {"orders": 1})


def test_a_record_without_a_key_is_read(uri: str) -> None:
    store(uri, letter("8"), letter("9", partition_key=None))
    found = opened(uri)
    (shard,) = found.shards
    (page,) = shard.pages
    records = found.read(shard, page)
    assert records.schema == RECORD_SCHEMA
    assert records["partition_key"].to_pylist() == ["k", None]
    assert mark_records(uri, None, named_by(found), LATER) == 2


def test_pages_are_bounded_and_never_cut_a_sequence_number(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(uri, *(letter(n, sub) for n in range(4) for sub in range(3)))
    assert [len(page) for page in data(opened(uri, page_records=7))[0]] == [6, 6]
    assert [len(page) for page in data(opened(uri, page_records=2))[0]] == [3, 3, 3, 3]
    monkeypatch.setattr(module, "MAX_PAGE_BYTES", 1_000)
    store(uri, letter(9, data=b"\xff" * 5_000), letter(10), letter(11, data=b"\0" * 900))
    assert [len(page) for page in data(opened(uri))[0]] == [12, 1, 2]


def test_streams_and_shards_are_told_apart_and_many_share_a_shard(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(
        uri,
        letter(1, data=b"a"),
        letter(1, shard_id="shardId-000000000001", data=b"b"),
        letter(2, stream="it's", data=b"c"),
    )
    found = opened(uri)
    assert sorted(map(str, data(found))) == ["[[b'a']]", "[[b'b']]", "[[b'c']]"]
    assert found.streams == {"orders": 2, "it's": 1}
    monkeypatch.setattr(module, "MAX_SHARDS", 1)
    # a and b have the same position, so they cannot be in one shard
    assert sorted(map(str, data(opened(uri)))) == ["[[b'a', b'c']]", "[[b'b']]"] or sorted(
        map(str, data(opened(uri)))
    ) == ["[[b'b']]", "[[b'c', b'a']]"]


def test_repeated_rows_are_one_record_and_a_stream_that_was_created_again_has_its_own(
    uri: str,
) -> None:
    again = {"approximate_arrival_timestamp": NOON + timedelta(days=1), "data": b"new stream"}
    store(uri, letter(1), letter(2))
    store(uri, letter(1, batch_id="b2", failed_at=LATER), letter(1, **again))
    found = opened(uri)
    assert data(found) == [[[b"1/0", b"2/0"]], [[b"new stream"]]]
    assert found.records == 3
    assert mark_records(uri, None, named_by(found), LATER) == 4
    assert opened(uri).records == 0


def test_only_the_chosen_records(uri: str) -> None:
    arn = "arn:aws:kinesis:us-east-1:123456789012:stream/other"
    store(
        uri,
        letter(1, failed_at=NOON),
        letter(2, failed_at=NOON + SECOND, stream=arn),
        letter(3, replayed_at=NOON),
    )
    for selection, expected in (
        (Selection(), [b"1/0", b"2/0"]),
        (Selection(begin=NOON, end=NOON + SECOND), [b"1/0"]),
        (Selection(begin=NOON + SECOND), [b"2/0"]),
        (Selection(only_stream="other"), [b"2/0"]),
        (Selection(only_stream=arn), [b"2/0"]),
        (Selection(only_stream="ther"), []),
    ):
        pages = [page for shard in data(opened(uri, selection)) for page in shard]
        assert sorted(one for page in pages for one in page) == expected


def test_rows_that_are_no_records_are_counted_and_left_out(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(
        uri,
        letter(1),
        letter("LATEST"),
        letter("007"),
        letter("9" * 130),
        letter(2, sub=-1),
        *(letter(3, **{name: None}) for name in ("data", "stream", "shard_id")),
        letter(4, approximate_arrival_timestamp=None),
    )
    found = opened(uri)
    assert data(found) == [[[b"1/0"]]]
    assert (found.records, found.unreadable) == (1, 8)
    assert "lease_key=shardId-000000000000" in found.example
    assert mark_records(uri, None, named_by(found), LATER) == 1
    assert marked(uri) == [b"1/0"]
    monkeypatch.setattr(module, "MAX_LAYERS", 2)
    times = [NOON + timedelta(days=day) for day in range(3)]
    store(uri, *(letter(7, approximate_arrival_timestamp=at, data=b"%d" % at.day) for at in times))
    found = opened(uri)
    assert data(found) == [[[b"1"]], [[b"2"]]]
    assert (found.records, found.unreadable) == (2, 9)
    assert mark_records(uri, None, named_by(found), LATER + SECOND) == 2


def test_an_empty_table_and_none(uri: str) -> None:
    store(uri, letter(1, replayed_at=NOON))
    assert (opened(uri).shards, opened(uri).records) == ((), 0)
    assert mark_records(uri, None, named_by(opened(uri)), LATER) == 0
    found = DeadLetterRecords(f"{uri}-none", None, NO_TABLE, Selection())
    assert (found.shards, found.records, named_by(found).num_rows) == ((), 0, 0)
    with pytest.raises(SinkError, match="there is no dead-letter table at"):
        DeadLetterRecords(f"{uri}-none", None, 0, Selection())


def test_later_rows_are_neither_read_nor_marked(uri: str) -> None:
    store(uri, letter(1), letter(2, lease_key=None, batch_id=None, failed_at=None))
    found = opened(uri)
    store(uri, letter(1, failed_at=LATER), letter(3), letter(1, batch_id="b2"))
    assert data(found) == [[[b"1/0", b"2/0"]]]
    assert mark_records(uri, None, named_by(found), LATER) == 2
    waiting = opened(uri)
    assert (waiting.records, named_by(waiting).num_rows) == (2, 3)
    assert data(found) == [[[b"1/0", b"2/0"]]], "the version is read as it was"


def test_a_lost_answer_and_a_repeated_mark_change_nothing(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(uri, letter(1), letter(2))
    named = named_by(opened(uri))
    execute = TableMerger.execute

    def lands_and_fails(self: TableMerger) -> object:
        execute(self)
        raise OSError("the answer was lost")

    with monkeypatch.context() as patched:
        patched.setattr(TableMerger, "execute", lands_and_fails)
        with pytest.raises(SinkError, match="the answer was lost"):
            mark_records(uri, None, named, LATER)
    assert mark_records(uri, None, named, LATER) == 2
    assert mark_records(uri, None, named, LATER + SECOND) == 0, "the first mark stays"
    times = DeltaTable(uri).to_pyarrow_table()["replayed_at"].to_pylist()
    assert times == [LATER, LATER]


def test_workers_that_append_meanwhile_do_not_stop_the_mark(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(uri, letter(1))
    named = named_by(opened(uri))
    execute = TableMerger.execute

    def after_a_worker(self: TableMerger) -> object:
        monkeypatch.setattr(TableMerger, "execute", execute)
        store(uri, letter(5, shard_id="other"))
        return execute(self)

    monkeypatch.setattr(TableMerger, "execute", after_a_worker)
    assert mark_records(uri, None, named, LATER) == 1
    assert marked(uri) == [f"{1}/0".encode()]


def test_a_version_that_was_removed_is_one_sentence(uri: str) -> None:
    store(uri, letter(1))
    found = opened(uri)
    for file in Path(uri).glob("*.parquet"):
        file.unlink()
    (shard,) = found.shards
    with pytest.raises(SinkError, match=r"reading the dead-letter table .* at version 0"):
        found.read(shard, shard.pages[0])
    with pytest.raises(SinkError, match=r"reading the dead-letter table .* at version 0"):
        opened(uri)


def test_the_largest_number_can_be_replayed(uri: str) -> None:
    store(uri, letter("9" * 129), letter("0"), letter(BASE))
    assert len(data(opened(uri))[0][0]) == 3
