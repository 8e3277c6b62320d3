"""A Delta log that others write to: settings that change under a running worker, entries and hints
that are odd, huge or deep. A worker refuses with one sentence, or goes on; it never guesses a
number.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.schema import Field, PrimitiveType

from kcl_pipeline.delta.log import entry_facts, read_transactions
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.delta.storage import LocalStorage
from kcl_pipeline.errors import SinkError, TableMismatchError
from kcl_pipeline.sinks.sink import CommitOutcome
from tests.support.delta_tables import (
    NONE,
    Committer,
    NoWait,
    at,
    committer,
    entry,
    ids,
    seq,
    written,
)

SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "table")


def add_constraint(uri: str) -> None:
    DeltaTable(uri).alter.add_constraint({"positive": "id > 0"})


def let_transactions_expire(uri: str) -> None:
    properties = {"delta.setTransactionRetentionDuration": "interval 1 days"}
    DeltaTable(uri).alter.set_table_properties(properties)


CHANGES = [
    (add_constraint, r"check constraints \(positive\)"),
    (let_transactions_expire, r"expire \(delta\.setTransactionRetentionDuration\)"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES)
@pytest.mark.parametrize("contended", [False, True])
def test_a_change_under_a_running_worker_is_noticed(
    uri: str, change: Callable[[str], None], reason: str, contended: bool
) -> None:
    sink = committer(uri)
    sink.ensure(SCHEMA)
    assert sink.land(written(uri, 1), [entry("a", 1)]).version == 1
    change(uri)
    if contended:
        sink._pace.lost(3)
    with pytest.raises(TableMismatchError, match=reason):
        sink.land(written(uri, 2), [entry("a", 2, seq(1))])
    with pytest.raises(TableMismatchError, match=reason):
        sink.stored("a")
    with pytest.raises(TableMismatchError, match=reason):
        sink.move("a", 2, seq(1))
    with pytest.raises(TableMismatchError, match=reason):
        committer(uri).stored("a")
    assert ids(uri) == [1]
    assert not list(Path(uri).glob("_kcl_pipeline/announced/*"))


def test_a_change_in_the_middle_of_a_commit_is_noticed(uri: str) -> None:
    """Between the comparison of the numbers and the write: the version is taken, and looked at."""
    sink = committer(uri)
    sink.ensure(SCHEMA)
    append = sink.delta_log.append

    def late(*arguments: object) -> None:
        sink.delta_log.append = append  # type: ignore[method-assign]
        add_constraint(uri)
        append(*arguments)  # type: ignore[arg-type]

    sink.delta_log.append = late  # type: ignore[method-assign]
    with pytest.raises(TableMismatchError, match="check constraints"):
        sink.land(written(uri, 1), [entry("a", 1)])
    assert ids(uri) == []


def test_a_worker_goes_on_once_the_change_is_taken_back(uri: str) -> None:
    sink = committer(uri)
    sink.ensure(SCHEMA)
    add_constraint(uri)
    with pytest.raises(TableMismatchError):
        sink.stored("a")
    DeltaTable(uri).alter.drop_constraint("positive")
    assert sink.stored("a") == NONE
    assert sink.land(written(uri, 1), [entry("a", 1)]).version is not None


def test_a_batch_that_landed_before_the_change_is_reported_landed(uri: str) -> None:
    sink, batch = committer(uri), written(uri, 1)
    sink.ensure(SCHEMA)
    assert sink.land(batch, [entry("a", 1)]).version == 1
    add_constraint(uri)
    # The change is a version of its own, and has the commit, too.
    assert sink.land(batch, [entry("a", 1)]) == CommitOutcome(2)


def test_columns_that_others_change_are_compared_again(uri: str) -> None:
    sink = committer(uri)
    sink.ensure(SCHEMA)
    assert sink.land(written(uri, 1), [entry("a", 1)]).version == 1
    DeltaTable(uri).alter.add_columns([Field("must", PrimitiveType("string"))])
    assert sink.land(written(uri, 2), [entry("a", 2, seq(1))]).version == 3
    replaced = pa.schema([("id", pa.string())])
    DeltaTable.create(uri, replaced, mode="overwrite")
    with pytest.raises(TableMismatchError, match="id is bigint in the output and string"):
        sink.land(written(uri, 3), [entry("a", 3, seq(2))])


def test_adding_columns_does_not_skip_the_comparison_of_the_numbers(uri: str) -> None:
    """The log moves while the batch's columns are added; who moved it may have the shard."""
    sink, rival = committer(uri, schema_evolution=True), committer(uri)
    sink.ensure(SCHEMA)
    batch = written(uri, 1, note=pa.array(["n"]))
    add = sink.delta_log.add_columns

    def late(fields: list[pa.Field]) -> None:
        sink.delta_log.add_columns = add  # type: ignore[method-assign]
        rival.move("a", 9)
        add(fields)

    sink.delta_log.add_columns = late  # type: ignore[method-assign]
    assert sink.land(batch, [entry("a", 1)]) == CommitOutcome(None, ("a",))
    assert ids(uri) == []


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


NOT_UNDERSTOOD = {
    "too large": '{"txn":{"appId":"app/a","version":9223372036854775808}}',
    "a float": '{"txn":{"appId":"app/a","version":1.0}}',
    "a text": '{"txn":{"appId":"app/a","version":"1"}}',
    "true": '{"txn":{"appId":"app/a","version":true}}',
    "no version": '{"txn":{"appId":"app/a"}}',
    "no name": '{"txn":{"version":1}}',
    "a list": '{"txn":[]}',
    "no object": '"txn"',
    "deep": '{"txn":{"appId":"app/a","version":1},"x":' + deep(200_000) + "}",
    "cut": '{"txn":{"appId":"app/a","ver',
    "two on one line": '{"txn":{"appId":"app/a","version":1}} {"txn":{"appId":"c","version":1}}',
    "a name that is no text": '{"txn":{"appId":7,"version":1}}',
}


@pytest.mark.parametrize("line", NOT_UNDERSTOOD.values(), ids=NOT_UNDERSTOOD.keys())
def test_a_transaction_that_is_not_understood_is_not_answered(uri: str, line: str) -> None:
    with pytest.raises(ValueError):
        entry_facts(line.encode())
    sink = committer(uri)
    sink.ensure(SCHEMA)
    assert sink.stored("a") == NONE
    path = Path(uri) / "_delta_log" / f"{1:020d}.json"
    path.write_text(f'{{"commitInfo":{{"timestamp":1}}}}\n{line}\n')
    assert read_transactions(LocalStorage(Path(uri)), 1) is None
    failure = ""
    try:  # delta-rs decides; what is asked is answered right, or not at all
        assert sink.stored("a") in (NONE, seq(1))
        assert sink.land(written(uri, 1), [entry("b", 1)]).version == 2
    except SinkError as error:
        failure = str(error)
    assert len(failure) < 1000


def test_an_action_that_is_no_text_is_not_understood() -> None:
    line = b'{"txn":{"appId":"app/a","version":1,"lastUpdate\xff":1}}'
    with pytest.raises(ValueError, match="decode"):
        entry_facts(line)


def test_a_key_may_be_written_with_escapes(uri: str) -> None:
    line = b'{"\\u0074xn":{"appId":"app/\\u0061","version":7}}'
    assert json.loads(line) == {"txn": {"appId": "app/a", "version": 7}}
    assert entry_facts(line).transactions == {"app/a": 7}
    assert entry_facts(b'{"meta\\u0044ata":{"id":"x"}}').changes_table
    assert not entry_facts(b'{"add":{"path":"a\\u0020b"}}').changes_table


def test_empty_lines_are_no_actions() -> None:
    entry = b'\n{"txn":{"appId":"a","version":1}}\r\n \n{"txn":{"appId":"a","version":2}}\n\n'
    assert entry_facts(entry).transactions == {"a": 2}
    assert entry_facts(b"").transactions == {}


def test_what_stands_in_a_text_of_an_entry_is_no_action() -> None:
    entry = json.dumps({"commitInfo": {"userMetadata": '{"txn": 1, "metaData": {}}'}}).encode()
    facts = entry_facts(entry)
    assert (facts.transactions, facts.changes_table) == ({}, False)


@pytest.mark.parametrize(
    "hint",
    [
        deep(200_000),
        '{"version":1,"parts":1000000000}',
        '{"version":' + "9" * 5000 + "}",
        '{"version":-1}',
        '{"version":1.0}',
        '{"version":"1"}',
        "null",
        "",
        "x" * 5_000_000,
    ],
    ids=["deep", "parts", "digits", "negative", "float", "text", "null", "empty", "long"],
)
def test_a_hint_of_a_checkpoint_that_is_odd_is_not_followed(uri: str, hint: str) -> None:
    sink = committer(uri)
    sink.ensure(SCHEMA)
    assert sink.land(written(uri, 1), [entry("a", 1)]).version == 1
    (Path(uri) / "_delta_log" / "_last_checkpoint").write_text(hint)
    assert read_transactions(LocalStorage(Path(uri)), 1) is None


@pytest.mark.timeout(30)
def test_an_entry_that_is_no_file_does_not_stop_a_worker(uri: str) -> None:
    sink = committer(uri)
    sink.ensure(SCHEMA)
    assert sink.stored("a") == NONE
    os.mkfifo(Path(uri) / "_delta_log" / f"{1:020d}.json")
    assert sink.delta_log.peek()
    assert read_transactions(LocalStorage(Path(uri)), 1) is None


def test_an_entry_over_the_limit_is_left_to_the_library(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = committer(uri)
    sink.ensure(SCHEMA)
    assert sink.stored("a") == NONE
    monkeypatch.setattr("kcl_pipeline.delta.log.MAX_ENTRY_BYTES", 100)
    assert committer(uri).land(written(uri, 1), [entry("a", 5)]).version == 1
    assert sink.stored("a") == at(5)
    assert sink.land(written(uri, 2), [entry("a", 6, at(5))]).version == 2
    assert ids(uri) == [1, 2]


@pytest.mark.parametrize("given", ["0", "x", "9" * 5000, "-1", "1.5"])
def test_an_odd_checkpoint_interval_does_not_fail_a_commit(
    uri: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = committer(uri)
    sink.ensure(SCHEMA)
    metadata = DeltaTable.metadata

    def odd(self: DeltaTable) -> object:
        found = metadata(self)
        found.configuration["delta.checkpointInterval"] = given
        return found

    monkeypatch.setattr(DeltaTable, "metadata", odd)
    assert sink.land(written(uri, 1), [entry("a", 1)]).version == 1
    assert sink.stored("a") == seq(1)


def test_an_error_of_the_library_is_one_bounded_line_without_secrets(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "hXq81tZsTopSecret/+"
    options = {"AWS_SECRET_ACCESS_KEY": secret, "AWS_REGION": "eu-central-1"}
    sink = Committer(
        DeltaSink(uri, storage_options=options),
        "app",
        clock=NoWait(),
        rng=random.Random(1),
    )
    sink.ensure(SCHEMA)

    def fails(*_: object, **__: object) -> None:
        raise OSError(f"key {secret} in eu-central-1 \x1b[31m{'x' * 100_000}\nsecond line")

    monkeypatch.setattr(LocalStorage, "create_new", fails)
    with pytest.raises(SinkError) as caught:
        sink.land(written(uri, 1), [entry("a", 1)])
    assert "key *** in eu-central-1" in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    assert caught.value.__cause__ is None, "a chained error would show the secret"
