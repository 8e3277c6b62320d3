"""Announcements that no worker has written: anyone who may write to the table's folder can put one
there.

None is committed, none fails or delays a commit of anybody else, and each is removed or ignored for
good, with an event. Only the first part uses what is inside; the attacks go through the public sink
and the file system.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.schema import Field, PrimitiveType

from kcl_pipeline.batch import CommitEntry, CommitOutcome, TxnVersions
from kcl_pipeline.delta.announcements import (
    FOLDER,
    FORMAT,
    MAX_ANNOUNCEMENT_BYTES,
    AnnouncementError,
    Claim,
    decoded,
)
from kcl_pipeline.delta.combined_commits import MAX_HELD_BYTES
from kcl_pipeline.delta.layout import TableLayout
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.delta.storage import local
from kcl_pipeline.events import AnnouncementRejected, Event
from tests.delta.test_sink import NoWait, ids, log_lines, written
from tests.support import announcing

SCHEMA = pa.schema([("id", pa.int64())])
NONE = TxnVersions()
HEX = "0123456789abcdef" * 2


class Attack:
    """A table, the events of its workers, and a forger with the right to write to its folder."""

    def __init__(self, folder: Path) -> None:
        self.outside = folder / "outside.parquet"
        self.root = folder / "table"
        self.uri = str(self.root)
        self.events: list[Event] = []
        self.turn = 0
        pq.write_table(pa.table({"id": pa.array([666], pa.int64())}), self.outside)
        self.sink().ensure_table(SCHEMA)

    def sink(self) -> DeltaCommitter:
        made = DeltaCommitter(
            DeltaSink(self.uri),
            "app",
            clock=NoWait(),  # type: ignore[arg-type]
            rng=random.Random(7),
            events=self.events.append,
        )
        made._pace.lost(3)  # other writers were in the way lately
        return made

    def honest(self, ident: int, key: str = "a") -> dict[str, Any]:
        """The content of an announcement that could land, which is not there any more."""
        batch = announcing.announce(
            self.sink(),
            written(self.uri, ident).files,
            Claim(f"app/{key}", f"app/{key}/fence", 5, NONE),
        )
        path = self.root / batch.name
        content = {"name": path.stem, **json.loads(path.read_text())}
        path.unlink()
        return content

    def put(self, content: dict[str, Any] | bytes | str, name: str | None = None) -> Path:
        folder = self.root / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(content, dict):
            name = content["name"] if name is None else name
            content = json.dumps({key: one for key, one in content.items() if key != "name"})
        path = folder / f"{HEX if name is None else name}.json"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def commit(self) -> CommitOutcome:
        """A commit of a worker in a crowd: of its own lease, by a process that starts anew."""
        self.turn += 1
        sink = self.sink()
        expected = sink.numbers(["own"])["own"]
        return sink.commit(
            written(self.uri, 100 + self.turn), [CommitEntry("own", self.turn, expected)]
        )

    def rejections(self) -> list[AnnouncementRejected]:
        return [event for event in self.events if isinstance(event, AnnouncementRejected)]


@pytest.fixture
def attack(tmp_path: Path) -> Attack:
    return Attack(tmp_path)


def assert_harmless(attack: Attack, forged: Path | None = None) -> None:
    """Two commits and a takeover go on as if the forged announcement was not there."""
    assert attack.commit().version is not None
    assert attack.sink().fence("z", NONE) == TxnVersions(None, 1)
    assert attack.sink().fence("a", NONE) == TxnVersions(None, 1)
    assert attack.commit().version is not None
    assert ids(attack.uri) == [101, 102]
    added = [line["add"]["path"] for line in log_lines(attack.uri) if "add" in line]
    assert len(added) == 2
    assert len(attack.rejections()) == 1 if forged is None else attack.rejections()
    assert forged is None or not forged.exists()


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
    "format",
    "files",
    "claims",
    "layout",
    "files.0.path",
    "files.0.size",
    "files.0.rows",
    "files.0.partitionValues",
    "files.0.modifiedMillis",
    "claims.0.dataId",
    "claims.0.fenceId",
    "claims.0.number",
    "claims.0.more",
    "files.0.more",
    "more",
]
VALID = [("files.0.partitionValues", {})]


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_another_type_or_range(attack: Attack, field: str) -> None:
    for value in (one for one in VALUES if (field, one) not in VALID):
        content = attack.honest(1)
        change(field, value)(content)
        attack.put(content)
        assert attack.commit().version is not None, value
        assert attack.sink().fence(f"z{value!r}", NONE) is not None
        attack.commit()
        assert 1 not in ids(attack.uri), value
    assert attack.rejections()


RAW = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "a number": b"7",
    "null": b"null",
    "no text": b"\xff\xfe\x00",
    "only a format": b'{"format":%d}' % FORMAT,
    "deep lists": deep(200_000).encode(),
    "deep in a field": b'{"format":%d,"files":%s}' % (FORMAT, deep(200_000).encode()),
    "deep in an unknown field": b'{"x":%s,"format":%d}' % (deep(200_000).encode(), FORMAT),
    "an endless number": b'{"format":%s}' % (b"9" * 500_000),
    "the same key twice": b'{"format":%d,"format":%d}' % (FORMAT, FORMAT),
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW.keys())
def test_what_has_not_the_form_of_an_announcement(attack: Attack, raw: bytes) -> None:
    attack.put(raw)
    assert_harmless(attack)


@pytest.mark.parametrize(
    "alter",
    [
        change("claims.0.expectedData", 5),
        change("claims.0.fenceId", "app/b/fence"),
        change("claims.0.dataId", "app/b"),
        change("claims", []),
        lambda content: content["claims"].append(content["claims"][0]),
        lambda content: content["files"].append(content["files"][0]),
        lambda content: content["claims"].append(
            {
                "dataId": "app/a/fence",
                "fenceId": "app/a/fence/fence",
                "number": 7,
                "expectedData": None,
                "expectedFence": None,
            }
        ),
    ],
    ids=["new is old", "fence", "lease", "no lease", "lease twice", "file twice", "fence as lease"],
)
def test_an_announcement_that_contradicts_itself(attack: Attack, alter: Callable) -> None:
    content = attack.honest(1)
    alter(content)
    assert_harmless(attack, attack.put(content))


def test_a_fence_of_mine_that_is_announced_as_a_lease(attack: Attack) -> None:
    content = attack.honest(1)
    content["claims"][0] |= {"dataId": "app/own/fence", "fenceId": "app/own/fence/fence"}
    attack.put(content)
    assert attack.commit().version is not None
    assert attack.sink().numbers(["own"]) == {"own": TxnVersions(1)}


def test_a_huge_one_is_not_read(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    path = attack.put(b"")
    with path.open("wb") as file:
        file.truncate(200_000_000)
    lengths: list[int] = []
    read = local._read

    def noted(*arguments: Any) -> bytes:
        data = read(*arguments)
        lengths.append(len(data))
        return data

    monkeypatch.setattr(local, "_read", noted)
    assert_harmless(attack, path)
    assert max(lengths) < 10_000


def test_many_large_ones_are_not_held_at_once(attack: Attack) -> None:
    """Each can be an announcement, and never lands."""
    content = attack.honest(1)
    claim = content["claims"][0]
    content["claims"] = [
        claim | {"dataId": f"app/{n}{'x' * 900}", "fenceId": f"app/{n}{'x' * 900}/fence"}
        for n in range(500)
    ]
    content["claims"][-1]["expectedData"] = 3
    content["files"] = []
    text = json.dumps(content | {"name": None}).replace(', "name": null', "")
    text = text.replace('"name": null, ', "")
    assert 900_000 < len(text) < MAX_ANNOUNCEMENT_BYTES
    for number in range(60):
        attack.put(text, f"{number:032x}")
    sink = attack.sink()
    most = 0
    for turn in range(1, 10):
        batch = written(attack.uri, 100 + turn)
        outcome = sink.commit(batch, [CommitEntry("own", turn, TxnVersions(turn - 1 or None))])
        assert outcome.version is not None
        held = sum(size for _, size in sink._announcements._known.values())
        most = max(most, held)
    assert MAX_HELD_BYTES // 2 < most <= MAX_HELD_BYTES
    assert attack.rejections() == [], "they are well-formed"
    assert list((attack.root / FOLDER).iterdir()) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fifo", "socket", "folder", "link", "dangling link"])
def test_what_is_no_file(attack: Attack, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = attack.put(b"")
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        monkeypatch.chdir(path.parent)  # a socket's name is short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    elif kind == "folder":
        path.mkdir()
    else:
        honest = attack.root.parent / "honest.json"
        if kind == "link":
            honest.write_text("{}")
        path.symlink_to(honest)
    began = time.monotonic()
    if kind == "folder":
        assert attack.commit().version is not None
    else:
        assert_harmless(attack, path)
    assert time.monotonic() - began < 20
    assert kind != "link" or (attack.root.parent / "honest.json").read_text() == "{}"


def test_a_folder_of_announcements_that_is_a_link_deletes_nothing(
    attack: Attack, tmp_path: Path
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / f"{HEX}.json").write_text("{}")
    folder = attack.root / FOLDER
    folder.parent.mkdir(exist_ok=True)
    folder.symlink_to(private)
    for _ in range(3):
        assert attack.commit().version is not None
    assert (private / f"{HEX}.json").read_text() == "{}"
    assert {event.name for event in attack.rejections()} == {FOLDER}


def test_one_that_cannot_be_removed_is_read_once(
    attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = attack.put(b"{}")
    sink = attack.sink()
    reads: list[str] = []
    read = local._read

    def noted(name: str, *arguments: Any) -> bytes:
        reads.append(name)
        return read(name, *arguments)

    def denied(_path: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(local, "_read", noted)
    monkeypatch.setattr(sink._log.storage, "delete", denied)
    for turn in range(1, 5):
        batch = written(attack.uri, 100 + turn)
        outcome = sink.commit(batch, [CommitEntry("own", turn, TxnVersions(turn - 1 or None))])
        assert outcome.version == turn
    assert path.exists()
    assert sum(one.endswith(f"{HEX}.json") for one in reads) == 1
    assert [event.removed for event in attack.rejections()] == [False]


def test_a_crowd_of_bad_ones_hides_no_good_one_for_long(attack: Attack) -> None:
    good = attack.honest(1)
    for number in range(250):
        attack.put(b"{}", f"{number:032x}")
    attack.put(good)
    for _ in range(4):
        assert attack.commit().version is not None
    assert 1 in ids(attack.uri)
    assert list((attack.root / FOLDER).iterdir()) == []


@pytest.mark.parametrize("number", [1, FORMAT + 1])
def test_another_format_is_for_others_to_judge(attack: Attack, number: int) -> None:
    path = attack.put(json.dumps({"format": number, "files": 5, "claims": [7]}))
    sink = attack.sink()
    for turn in range(1, 4):
        batch = written(attack.uri, 100 + turn)
        assert sink.commit(batch, [CommitEntry("own", turn, TxnVersions(turn - 1 or None))]).version
    assert path.exists()
    assert [(one.reason, one.removed) for one in attack.rejections()] == [
        (f"its format is not {FORMAT}", False)
    ]


def test_an_event_has_one_short_printable_line(attack: Attack) -> None:
    folder = attack.root / FOLDER
    folder.mkdir(parents=True)
    (folder / "a\nERROR forged \x1b[31m.json").write_text("{}")
    attack.put(json.dumps({"format": FORMAT, "x" * 100_000: 1}))
    attack.commit()
    assert len(attack.rejections()) == 2
    for event in attack.rejections():
        assert event.name.isprintable()
        assert event.reason.isprintable()
        assert len(event.name + event.reason) < 1000


def test_others_announcements_that_the_log_refuses_cost_one_attempt(
    attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the checks do not see: a commit that failed with them is made without them."""
    path = attack.put(attack.honest(1))
    monkeypatch.setattr("kcl_pipeline.delta.combined_commits.check_layout", lambda *_: None)
    append = DeltaTable.create_write_transaction

    def refuses(self: DeltaTable, actions: list[Any], *more: Any, **options: Any) -> None:
        if len(actions) > 1:
            raise ValueError("this is not a valid action")
        append(self, actions, *more, **options)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", refuses)
    assert_harmless(attack, path)
    assert [event.reason for event in attack.rejections()] == [
        "a commit that included it failed, and succeeded without it"
    ]


def test_a_takeover_survives_an_announcement_that_the_log_refuses(
    attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = attack.put(attack.honest(1))
    append = DeltaTable.create_write_transaction

    def refuses(self: DeltaTable, actions: list[Any], *more: Any, **options: Any) -> None:
        if actions:
            raise ValueError("this is not a valid action")
        append(self, actions, *more, **options)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", refuses)
    assert attack.sink().fence("a", NONE) == TxnVersions(None, 1)
    assert not path.exists()
    assert len(attack.rejections()) == 1


def test_an_announcement_from_before_a_change_of_the_schema_does_not_land(attack: Attack) -> None:
    attack.put(attack.honest(1))
    DeltaTable(attack.uri).alter.add_columns([Field("more", PrimitiveType("long"))])
    for _ in range(2):
        assert attack.commit().version is not None
    assert ids(attack.uri) == [101, 102]


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


def test_the_name_says_which_folder_is_the_announcers() -> None:
    content = {"format": FORMAT, "layout": "d", "files": [], "claims": []}
    for name in ("x", f"{FOLDER}/x.json", f"{FOLDER}/{HEX.upper()}.json", f"{FOLDER}/{HEX}.json2"):
        with pytest.raises(AnnouncementError):
            decoded(json.dumps(content).encode(), name)
