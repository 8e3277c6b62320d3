"""The dead-letter table has every failed record at least once; readers take one row of each."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from kcl_pipeline.delta.sink import DeadLetterTable
from kcl_pipeline.errors import SinkError, TableMismatchError
from tests.support.delta_tables import dead_letter_table as table
from tests.support.delta_tables import log_lines

PAGE = Path(__file__).parents[2] / "docs" / "dead-letters.md"
BASE = 49_590_338_271_490_256_608_559_692_538_361_571_095_921_575_989_136_588_898
"""As large as the sequence numbers of Kinesis are."""


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "dead")


def letters(*numbers: int, shard: str = "s-1", failed_at: int = 0) -> pa.Table:
    count = len(numbers)
    return pa.table(
        {
            "stream": pa.array(["orders"] * count, pa.string()),
            "shard_id": pa.array([shard] * count, pa.string()),
            "data": pa.array([b"%d" % one for one in numbers], pa.binary()),
            "lease_key": pa.array([shard] * count, pa.string()),
            "sequence_number": pa.array([str(BASE + one) for one in numbers], pa.string()),
            "sub_sequence_number": pa.array([0] * count, pa.int64()),
            "error": pa.array([f"error {failed_at}"] * count, pa.string()),
            "failed_at": pa.array([failed_at] * count, pa.timestamp("us", "UTC")),
        }
    )


def numbers_of(rows: pa.Table) -> list[int]:
    return sorted(int(one) - BASE for one in rows["sequence_number"].to_pylist())


def there(uri: str) -> list[int]:
    return numbers_of(DeltaTable(uri).to_pyarrow_table())


def read(uri: str) -> pa.Table:
    """Read the table as the page shows."""
    (query,) = re.findall(r'query = """\n(.*?)"""', PAGE.read_text(encoding="utf-8"), re.DOTALL)
    builder = QueryBuilder().register("letters", DeltaTable(uri))
    return pa.table(builder.execute(query).read_all())


@pytest.mark.parametrize("seed", range(4))
def test_readers_get_each_record_once(uri: str, seed: int) -> None:
    """Batches begin at what is committed and end anywhere; workers take turns and restart."""
    rng = random.Random(seed)
    failing = sorted(rng.sample(range(1000), 60))
    workers = [table(uri) for _ in range(3)]
    committed = turn = 0
    while committed < 1000:
        turn += 1
        through = min(committed + rng.choice([10, 100, 400]), 1000)
        found = [one for one in failing if committed <= one < through]
        number = rng.randrange(3)
        workers[number].append(letters(*found, failed_at=turn))
        if rng.random() < 0.3:
            workers[number] = table(uri)
        if rng.random() < 0.5:
            committed = through
    assert set(there(uri)) == set(failing)
    assert numbers_of(read(uri)) == failing


def test_readers_get_the_newest_row(uri: str) -> None:
    table(uri).append(letters(1, 2, failed_at=1))
    table(uri).append(letters(2, failed_at=5))
    table(uri).append(letters(1, shard="s-2", failed_at=2))
    rows = read(uri).select(["shard_id", "sequence_number", "error"]).to_pylist()
    errors = {(row["shard_id"], int(row["sequence_number"]) - BASE): row["error"] for row in rows}
    assert errors == {("s-1", 1): "error 1", ("s-1", 2): "error 5", ("s-2", 1): "error 2"}


def test_there_are_no_transactions(uri: str) -> None:
    table(uri).append(letters(1))
    assert [line for line in log_lines(uri) if "txn" in line] == []


def interrupted(worker: DeadLetterTable, rival: Callable[[], object]) -> DeadLetterTable:
    append = worker._log.add

    def paused(*arguments: object) -> None:
        worker._log.add = append  # type: ignore[method-assign]
        rival()
        append(*arguments)  # type: ignore[arg-type]

    worker._log.add = paused  # type: ignore[method-assign]
    return worker


def test_another_writer_is_faster(uri: str) -> None:
    table(uri).append(letters(1))
    interrupted(table(uri), lambda: table(uri).append(letters(5))).append(letters(6))
    assert there(uri) == [1, 5, 6]


def test_a_lost_answer_repeats_nothing(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = table(uri)
    worker.append(letters(1))
    append, calls = worker._log.add, []

    def lands_and_fails(*arguments: object) -> None:
        append(*arguments)  # type: ignore[arg-type]
        calls.append(arguments)
        if len(calls) == 1:
            raise SinkError("the answer was lost")

    def fails(*_: object) -> None:
        raise SinkError("not sent")

    monkeypatch.setattr(worker._log, "add", lands_and_fails)
    worker.append(letters(2))
    assert there(uri) == [1, 2]
    monkeypatch.setattr(worker._log, "add", fails)
    with pytest.raises(SinkError, match="not sent"):
        worker.append(letters(3))
    monkeypatch.setattr(worker._log, "add", append)
    worker.append(letters(3))
    assert there(uri) == [1, 2, 3]


def test_new_columns_and_partitions_are_the_tables(uri: str) -> None:
    fields = [("error", pa.string()), ("lease_key", pa.string()), ("mine", pa.int64())]
    DeltaTable.create(uri, pa.schema(fields), partition_by=["lease_key"])
    table(uri).append(letters(1, 2))
    rows = DeltaTable(uri).to_pyarrow_table().to_pylist()
    assert {row["lease_key"] for row in rows} == {"s-1"}
    assert {row["mine"] for row in rows} == {None}
    assert len(rows) == 2


def test_a_table_with_a_constraint_is_refused(uri: str) -> None:
    table(uri).append(letters(1))
    DeltaTable(uri).alter.add_constraint({"said": "error <> ''"})
    with pytest.raises(TableMismatchError, match="check constraints"):
        table(uri).append(letters(2))
    assert there(uri) == [1]


def test_nothing_to_write_makes_no_table(uri: str) -> None:
    table(uri).append(letters())
    assert not Path(uri).exists()
