"""The dead-letter table has each failed record once, however often and in whatever cut its batch is
repeated, and none is lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from kcl_pipeline.delta.dead_letters.writer import DeadLetterTable
from kcl_pipeline.delta.maintenance import compact
from kcl_pipeline.errors import SinkError, TableMismatchError
from tests.support.delta_tables import dead_letter_table as table
from tests.support.delta_tables import log_lines

BASE = 49_590_338_271_490_256_608_559_692_538_361_571_095_921_575_989_136_588_898
"""As large as the sequence numbers of Kinesis are."""


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "dead")


def letters(*numbers: int, key: str = "s-1", sub: int = 0, error: str = "no") -> pa.Table:
    return pa.table(
        {
            "data": pa.array([b"%d" % one for one in numbers], pa.binary()),
            "lease_key": pa.array([key] * len(numbers), pa.string()),
            "sequence_number": pa.array([str(BASE + one) for one in numbers], pa.string()),
            "sub_sequence_number": pa.array([sub] * len(numbers), pa.int64()),
            "error": pa.array([error] * len(numbers), pa.string()),
            "replayed_at": pa.array([None] * len(numbers), pa.timestamp("us", "UTC")),
        }
    )


def there(uri: str) -> list[int]:
    rows = DeltaTable(uri).to_pyarrow_table()["sequence_number"].to_pylist()
    return sorted(int(one) - BASE for one in rows)


def versions(uri: str) -> int:
    return DeltaTable(uri).version()


def test_the_retries_of_a_batch_write_its_dead_letters_once(uri: str) -> None:
    """54 records that fail, in a batch that the table does not take: 20 attempts, 20 restarts."""
    failed = letters(*range(54))
    worker = table(uri)
    assert worker.append(failed) == 54
    for _ in range(19):
        assert worker.append(failed) == 0
    for _ in range(20):
        assert table(uri).append(failed) == 0
    assert there(uri) == list(range(54))
    assert versions(uri) == 1, "a repetition commits nothing"


@pytest.mark.parametrize("seed", range(8))
def test_any_cut_and_any_worker(uri: str, seed: int) -> None:
    """Batches begin at what is committed and end anywhere; workers take turns and restart."""
    rng = random.Random(seed)
    failing = sorted(rng.sample(range(1000), 60))
    workers = [table(uri) for _ in range(3)]
    committed = 0
    while committed < 1000:
        through = min(committed + rng.choice([1, 10, 100, 400]), 1000)
        found = [one for one in failing if committed <= one < through]
        number = rng.randrange(3)
        workers[number].append(letters(*found))
        if rng.random() < 0.3:
            workers[number] = table(uri)
        if rng.random() < 0.5:
            committed = through
    assert there(uri) == failing


def test_leases_are_told_apart(uri: str) -> None:
    both = pa.concat_tables([letters(1, 2), letters(1, 2, key="s-2"), letters(1, sub=1)])
    worker = table(uri)
    assert worker.append(both.slice(0, 3)) == 3
    assert worker.append(both) == 2
    assert table(uri).append(both) == 0
    assert there(uri) == [1, 1, 1, 2, 2]
    ids = {line["txn"]["appId"] for line in log_lines(uri) if "txn" in line}
    assert ids == {"app/s-1/dead_letters", "app/s-2/dead_letters"}


def test_applications_that_share_a_table_do_not_hide_each_others_records(uri: str) -> None:
    assert table(uri, "one").append(letters(1, 2)) == 2
    assert table(uri, "two").append(letters(2, 3)) == 2
    assert table(uri, "one").append(letters(1, 2, 3)) == 1
    assert there(uri) == [1, 2, 2, 3, 3]


def interrupted(worker: DeadLetterTable, rival: Callable[[], object]) -> DeadLetterTable:
    append = worker._log.append

    def paused(*arguments: object) -> None:
        worker._log.append = append  # type: ignore[method-assign]
        rival()
        append(*arguments)  # type: ignore[arg-type]

    worker._log.append = paused  # type: ignore[method-assign]
    return worker


def test_two_workers_do_not_both_write_a_record(uri: str) -> None:
    """The old owner of a lease is paused between looking and writing."""
    table(uri).append(letters(1))
    old = interrupted(table(uri), lambda: table(uri).append(letters(5, 6)))
    assert old.append(letters(5, 6, 7)) == 1
    assert there(uri) == [1, 5, 6, 7]


def test_an_answer_that_was_lost(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = table(uri)
    worker.append(letters(1))
    append = worker._log.append

    def lands_and_fails(*arguments: object) -> None:
        append(*arguments)  # type: ignore[arg-type]
        raise SinkError("the answer was lost")

    def fails(*_: object) -> None:
        raise SinkError("not sent")

    monkeypatch.setattr(worker._log, "append", lands_and_fails)
    assert worker.append(letters(2)) == 0, "the table shows that it is there"
    monkeypatch.setattr(worker._log, "append", fails)
    with pytest.raises(SinkError, match="not sent"):
        worker.append(letters(3))
    monkeypatch.setattr(worker._log, "append", append)
    assert worker.append(letters(2, 3)) == 1
    assert there(uri) == [1, 2, 3]


def test_what_is_not_recognised_is_written_again_and_never_lost(
    uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    table(uri).append(letters(1, 2))
    (file,) = Path(uri).glob("batches/*/*.parquet")
    content = file.read_bytes()
    file.write_bytes(b"PAR1" + b"\0" * (len(content) - 4))
    assert table(uri).append(letters(1, 2, 3)) == 3
    assert "cannot read the dead letters" in caplog.text
    file.write_bytes(content)
    assert compact(uri).files_removed == 2
    assert table(uri).append(letters(2, 3)) == 2
    assert there(uri) == [1, 1, 2, 2, 2, 3, 3]


@pytest.mark.parametrize(
    "odd",
    [
        pa.table({"data": [b"x"], "error": ["no"]}),
        letters(1).set_column(2, "sequence_number", pa.array([None], pa.string())),
        letters(1).set_column(2, "sequence_number", pa.array(["LATEST"])),
        letters(1).set_column(2, "sequence_number", pa.array(["9" * 200])),
        letters(1).set_column(1, "lease_key", pa.array([None], pa.string())),
        letters(1).set_column(3, "sub_sequence_number", pa.array([None], pa.int64())),
    ],
    ids=["no columns", "null", "text", "long", "no lease", "no sub-sequence number"],
)
def test_a_record_without_a_position_is_written(uri: str, odd: pa.Table) -> None:
    assert table(uri).append(odd) == 1
    assert table(uri).append(pa.concat_tables([odd, letters(8, 9)], promote_options="default")) >= 2
    rows = DeltaTable(uri).to_pyarrow_table()
    assert rows.num_rows >= 3
    assert table(uri).append(letters(8, 9)) == 0


def test_the_longest_position_has_a_file_name(uri: str) -> None:
    longest = letters(1).set_column(2, "sequence_number", pa.array(["9" * 129]))
    assert table(uri).append(longest) == 1
    assert table(uri).append(longest) == 0


def test_a_process_remembers_a_bounded_number_of_records(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kcl_pipeline.delta.dead_letters.writer.MAX_KNOWN", 10)
    worker = table(uri)
    assert worker.append(letters(*range(30))) == 30
    assert worker._known == {}
    assert worker.append(letters(*range(31))) == 1
    assert worker.append(letters(30, 31)) == 1
    assert worker.append(letters(31, 32)) == 1
    assert there(uri) == list(range(33))


def test_new_columns_and_partitions_are_the_tables(uri: str) -> None:
    fields = [("error", pa.string()), ("lease_key", pa.string()), ("mine", pa.int64())]
    DeltaTable.create(uri, pa.schema(fields), partition_by=["lease_key"])
    worker = table(uri)
    assert worker.append(letters(1, 2)) == 2
    assert worker.append(letters(1, 2, 3)) == 1
    rows = DeltaTable(uri).to_pyarrow_table().to_pylist()
    assert {row["lease_key"] for row in rows} == {"s-1"}
    assert {row["mine"] for row in rows} == {None}
    assert len(rows) == 3


def test_a_table_with_a_constraint_is_refused(uri: str) -> None:
    table(uri).append(letters(1))
    DeltaTable(uri).alter.add_constraint({"said": "error <> ''"})
    with pytest.raises(TableMismatchError, match="check constraints"):
        table(uri).append(letters(2))
    assert there(uri) == [1]


def test_nothing_to_write_makes_no_table(uri: str) -> None:
    assert table(uri).append(letters()) == 0
    assert not Path(uri).exists()
