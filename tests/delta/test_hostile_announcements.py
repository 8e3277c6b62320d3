"""Announcements that no worker has written: anyone who may write to the table's folder can put one
there.

None is committed, none fails or delays a commit of anybody else, and each is removed or ignored for
good, with an event. Only the first part uses what is inside; the attacks go through the public sink
and the file system.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kcl_pipeline.delta.files import TableLayout
from tests.support.announcement_attack import Attack, assert_harmless
from tests.support.delta_tables import at, ids


@pytest.fixture
def attack(tmp_path: Path) -> Attack:
    return Attack(tmp_path)


def test_an_honest_one_lands(attack: Attack) -> None:
    """Or the tests below would show nothing."""
    attack.put(attack.honest(1))
    assert attack.commit().version is not None
    assert ids(attack.uri) == [1, 101]
    assert attack.rejections() == []


PATHS = [
    "../outside.parquet",
    "../../outside.parquet",
    "batches/../../outside.parquet",
    "/etc/passwd",
    "//etc/passwd.parquet",
    "_delta_log/00000000000000000000.json",
    "_delta_log/00000000000000000009.checkpoint.parquet",
    "_kcl_pipeline/announced/x.parquet",
    "file:///etc/passwd",
    "s3://other/bucket.parquet",
    "https://example.org/x.parquet",
    "%2e%2e/outside.parquet",
    "..%2foutside.parquet",
    "",
    ".",
    "batches",
    "a" * 5000 + ".parquet",
]


INSIDE = [
    "../../outside.parquet",
    "%2e%2e/%2e%2e/outside.parquet",
    "..\\..\\outside.parquet",
    "./part-0.parquet",
    "../{other}/part-0-00000.parquet",
    "_hidden/part.parquet",
    ".part.parquet",
    "part.parquet/..",
    "part.csv",
    "day=a/../../../../outside.parquet",
    "part\n.parquet",
    "part\0.parquet",
    "no/such/folder.parquet",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_is_not_below_the_batches(attack: Attack, path: str) -> None:
    content = attack.honest(1)
    content["files"][0]["path"] = path
    assert_harmless(attack, attack.put(content))


@pytest.mark.parametrize("path", INSIDE)
def test_a_path_that_leaves_the_announcers_folder(attack: Attack, path: str) -> None:
    content, other = attack.honest(1), attack.honest(2, "b")
    folder = content["files"][0]["path"].rpartition("/")[0]
    other_folder = other["files"][0]["path"].split("/")[1]
    content["files"][0]["path"] = f"{folder}/{path.format(other=other_folder)}"
    assert_harmless(attack, attack.put(content))


def test_a_file_of_another_announcement(attack: Attack) -> None:
    content, other = attack.honest(1), attack.honest(2, "b")
    content["files"] = other["files"]
    assert_harmless(attack, attack.put(content))


def test_a_file_that_is_a_link(attack: Attack) -> None:
    content = attack.honest(1)
    file = attack.root / content["files"][0]["path"]
    file.unlink()
    file.symlink_to(attack.outside)
    content["files"][0]["size"] = attack.outside.stat().st_size
    assert_harmless(attack, attack.put(content))


def test_a_folder_that_is_a_link(attack: Attack, tmp_path: Path) -> None:
    content = attack.honest(1)
    folder = (attack.root / content["files"][0]["path"]).parent
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert_harmless(attack, attack.put(content))


@pytest.mark.parametrize("size", [0, 1, 10**12])
def test_a_size_that_is_not_the_files(attack: Attack, size: int) -> None:
    content = attack.honest(1)
    content["files"][0]["size"] = size
    assert_harmless(attack, attack.put(content))


@pytest.mark.parametrize("values", [{"day": "x"}, {"id": "1"}])
def test_partition_columns_that_are_not_the_tables(attack: Attack, values: dict[str, str]) -> None:
    content = attack.honest(1)
    content["files"][0]["partitionValues"] = values
    assert_harmless(attack, attack.put(content))


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


def change(where: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(content: dict[str, Any]) -> None:
        *path, last = where.split(".")
        target: Any = content
        for step in path:
            target = target[int(step)] if step.isdigit() else target[step]
        target[last] = value

    return apply


VALUES = [None, True, 1.5, -(2**63) - 1, 2**63, 10**40, "x", "", [], {}, [[]], "\ud800x"]


FIELDS = [
    "tableId",
    "files",
    "entries",
    "form",
    "files.0.path",
    "files.0.size",
    "files.0.rows",
    "files.0.partitionValues",
    "files.0.modifiedMillis",
    "files.0.statistics",
    "entries.0.key",
    "entries.0.expected",
    "entries.0.becomes",
    "entries.0.becomes.number",
    "entries.0.becomes.sequenceNumber",
    "entries.0.more",
    "files.0.more",
    "more",
]


VALID = [
    ("files.0.partitionValues", {}),
    ("files.0.statistics", "x"),
    ("files.0.statistics", ""),
    ("entries.0.key", "x"),
    ("entries.0.becomes.sequenceNumber", None),
]


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_another_type_or_range(attack: Attack, field: str) -> None:
    forged = []
    for value in (one for one in VALUES if (field, one) not in VALID):
        content = attack.honest(1)
        change(field, value)(content)
        forged.append(attack.put(content))
    for turn in range(3):
        assert attack.commit().version is not None
        assert attack.sink().move(f"z{turn}", 1)
    assert attack.commit().version is not None
    assert 1 not in ids(attack.uri)
    assert attack.rejections()
    assert [path for path in forged if path.exists()] == []


RAW = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "a number": b"7",
    "null": b"null",
    "no text": b"\xff\xfe\x00",
    "only an id": b'{"tableId":"t"}',
    "deep lists": deep(200_000).encode(),
    "deep in a field": b'{"tableId":"t","files":%s}' % deep(200_000).encode(),
    "deep in an unknown field": b'{"x":%s,"tableId":"t"}' % deep(200_000).encode(),
    "an endless number": b'{"files":%s}' % (b"9" * 500_000),
    "the same key twice": b'{"tableId":"t","tableId":"t"}',
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW.keys())
def test_what_has_not_the_form_of_an_announcement(attack: Attack, raw: bytes) -> None:
    attack.put(raw)
    assert_harmless(attack)


@pytest.mark.parametrize(
    "alter",
    [
        change("entries.0.becomes.number", 0),
        change("entries.0.becomes.number", 2),
        change("entries", []),
        lambda content: content["entries"].append(content["entries"][0]),
        lambda content: content["files"].append(content["files"][0]),
    ],
    ids=["number repeats", "number left out", "no shard", "shard twice", "file twice"],
)
def test_an_announcement_that_contradicts_itself(attack: Attack, alter: Callable) -> None:
    content = attack.honest(1)
    alter(content)
    assert_harmless(attack, attack.put(content))


def test_my_own_shard_in_the_announcement_of_another(attack: Attack) -> None:
    content = attack.honest(1)
    content["entries"][0]["key"] = "app/own"
    attack.put(content)
    assert attack.commit().version is not None
    assert attack.sink().stored("own") == at(1)


LAYOUT = TableLayout(
    "d",
    {
        "int": pa.int32(),
        "text": pa.string(),
        "date": pa.date32(),
        "time": pa.timestamp("us", "UTC"),
        "flag": pa.bool_(),
        "price": pa.decimal128(5, 2),
        "share": pa.float64(),
    },
)


FITTING = {
    "int": ["0", "-2147483648", "2147483647"],
    "text": ["", "a b/é", "../x", "%2e"],
    "date": ["2026-01-31"],
    "time": ["2026-01-31 12:00:00", "2026-01-31 12:00:00.123456", "2026-01-31T12:00:00Z"],
    "flag": ["true", "false"],
    "price": ["1.25", "-999.99", "0"],
    "share": ["1.5", "-1e-7", "NaN", "5"],
}


UNFIT = {
    "int": ["2147483648", "1.0", "", "x", " 1", "1" * 5000, "١"],
    "text": ["a\0b"],
    "date": ["2026-02-30", "2026-1-1", "today", "2026-01-31 00:00:00"],
    "time": ["2026-01-31", "2026-13-01 00:00:00", "now", "2026-01-31 12:00:00.1234567"],
    "flag": ["True", "1", "yes"],
    "price": ["1000.00", "1.255", "NaN", "1e99"],
    "share": ["x", "", "1_0", "0x10"],
}


@pytest.mark.parametrize("name", LAYOUT.partitions)
def test_a_partition_value_is_of_its_columns_type(name: str) -> None:
    nulls = dict.fromkeys(LAYOUT.partitions)
    assert LAYOUT.problem(nulls) is None
    assert [one for one in FITTING[name] if LAYOUT.problem(nulls | {name: one})] == []
    assert [one for one in UNFIT[name] if not LAYOUT.problem(nulls | {name: one})] == []
