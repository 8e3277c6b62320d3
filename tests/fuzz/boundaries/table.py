"""What others write into a table's folder, and what reaches the driver's pin server."""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable

from kcl_pipeline.batch import DataFile
from kcl_pipeline.delta.files import TableLayout
from kcl_pipeline.delta.log import MAX_NUMBER, entry_facts, read_transactions
from kcl_pipeline.delta.sink import DeltaSink, is_batch_file, transaction_names
from kcl_pipeline.delta.storage import LocalStorage
from kcl_pipeline.events import AnnouncementRejected, Event
from kcl_pipeline.sinks.announcements import FOLDER, AnnouncedBatch, AnnouncementError, decoded
from tests.fuzz import values
from tests.fuzz.boundaries.rows import READ, REFUSED
from tests.fuzz.boundary import Boundary
from tests.support.delta_tables import NOTHING, Committer, entry, seq

HEX: Final = "0123456789abcdef" * 2


OTHER: Final = "f" * 32


PATHS: Final = (
    f"batches/b-{HEX}/part-0-00000.parquet",
    f"batches/b-{HEX}/{OTHER}/part-0-00000.parquet",
    f"batches/b-{HEX}/day=2026-01-01/part-0.c000.snappy.parquet",
    f"batches/b-{HEX}/day=..%2F..%2Fx/part-0.parquet",
    f"batches/b-{OTHER}/part-0-00000.parquet",
    f"batches/b-{HEX}/../b-{OTHER}/part-0.parquet",
    f"batches/b-{HEX}/day=x/../../../../y.parquet",
    "../../outside.parquet",
    "/etc/passwd",
    "_delta_log/00000000000000000000.json",
    "s3://other/x.parquet",
    f"batches/%2e%2e/b-{HEX}/x.parquet",
)


SOUND_FILE: Final = {"path": PATHS[0], "size": 7, "partitionValues": {}}


SOUND_ENTRY: Final = {
    "key": "app/a",
    "expected": {"number": 0},
    "becomes": {"number": 1, "sequenceNumber": "5"},
}


LAYOUTS: Final = (
    TableLayout("d", {}),
    TableLayout("d", {"day": pa.date32(), "n": pa.int32(), "price": pa.decimal128(5, 2)}),
)


DIGITS: Final = (b'"number":', b"9" * 30, b"1e5", b"-", b"\\u0074", b'"files":[', b"}", b"\\ud800")


def _announcement(random: Random) -> dict[str, Any]:
    days = {"day": "2026-01-31", "n": values.number_text(random)[:50], "price": "1.25"}
    file = {
        "path": random.choice(PATHS) if random.random() < 0.5 else PATHS[0],
        "size": random.choice((0, 7, 2**40, -1, 2**63)) if random.random() < 0.2 else 7,
        "rows": 3,
        "partitionValues": random.choice(({}, days, {"day": values.text(random)[:40]})),
        "modifiedMillis": 99,
        "statistics": '{"minValues":{"id":1}}',
    }
    number = random.choice((0, 0, 4, 2**63 - 1, 2**63, -1))
    one = {
        "key": "app/a",
        "expected": {"number": number, "sequenceNumber": random.choice(("4", "x", "9" * 200))},
        "becomes": {
            "number": number + random.choice((1, 1, 1, 0)),
            "sequenceNumber": "5",
            "ended": random.choice((False, True)),
        },
    }
    if random.random() < 0.5:
        one["expected"] = {"number": number}
    other = {**one, "key": "app/b"}
    return {
        "tableId": random.choice(("t", "t", "")),
        "form": random.choice(("d", "e", values.text(random)[:200])),
        "files": [file] * random.choice((1, 1, 1, 0, 2)),
        "entries": random.choice(([one], [one, other], [one, one], [])),
    }


def raw_bytes(random: Random, content: Any) -> bytes:
    """JSON of the content: sound, with one part changed, nested deeply, or with bytes changed."""
    kind = random.randrange(6)
    if kind == 0:
        content = values.damaged(random, content, values.json_leaf)
    text = json.dumps(content, separators=(",", ":"))
    if kind == 1:
        depth = random.choice((30, 900, 1_100, 100_000))
        deep = values.nested(*random.choice((("[", "]"), ('{"a":', "}"))), depth, "1")
        text = text.replace("7", deep, 1) if random.random() < 0.5 else deep
    raw = text.encode("utf-8", "surrogatepass")
    return values.mutated(random, raw, DIGITS) if kind == 2 else raw


def draw_announcement(random: Random) -> dict[str, Any]:
    """A name and a content."""
    names = (f"{FOLDER}/{HEX}.json",) * 8 + (f"{FOLDER}/{OTHER}.json", values.text(random)[:100])
    return {"name": random.choice(names), "body": raw_bytes(random, _announcement(random))}


def check_announcement(value: dict[str, Any]) -> str:
    """A batch whose files are in its own folder, or `AnnouncementError`."""
    try:
        batch = decoded(value["body"], value["name"])
    except AnnouncementError as refusal:
        error = str(refusal)
    else:
        return _checked(batch)
    assert error.isprintable()
    assert len(error) < 500
    return REFUSED


def _checked(batch: AnnouncedBatch) -> str:
    _assert_sound(batch)
    name = Path(batch.name).stem
    if not all(is_batch_file(file.path, name) for file in batch.files):
        return READ
    _assert_own_files(batch)
    for layout in LAYOUTS:
        if any(layout.problem(file.partition_values) for file in batch.files):
            continue
        _assert_readable(batch, layout)
        return "fits"
    return READ


def _assert_sound(batch: AnnouncedBatch) -> None:
    assert batch.expected.keys() == batch.becomes.keys() != set()
    for key, expected in batch.expected.items():
        assert 0 <= expected.number < batch.becomes[key].number <= MAX_NUMBER + 1


def _assert_own_files(batch: AnnouncedBatch) -> None:
    own = Path(batch.name).stem
    root = Path("/table")
    for file in batch.files:
        place = Path(os.path.normpath(root / file.path))
        assert place.is_relative_to(root / "batches"), file.path
        assert place.relative_to(root / "batches").parts[0].endswith(f"-{own}"), file.path
        assert place.suffix == ".parquet"
        assert 0 <= file.size <= MAX_NUMBER


def _assert_readable(batch: AnnouncedBatch, layout: TableLayout) -> None:
    for file in batch.files:
        assert set(file.partition_values) == set(layout.partitions)
        for name, kind in layout.partitions.items():
            value = file.partition_values[name]
            if value is not None:
                pa.scalar(value).cast(kind)


class _Table:
    """A table that is used again and again, and the leases of its one worker."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="fuzz-table-"))
        self.events: list[Event] = []
        self.sink = Committer(DeltaSink(str(self.root)), "app", events=self.events.append)
        self.sink.ensure(pa.schema([("id", pa.int64())]))
        self.turn = 0
        batch = self.root / f"batches/b-{HEX}"
        batch.mkdir(parents=True)
        for name in ("part-0-00000.parquet", "other.parquet"):
            (batch / name).write_bytes(b"PAR1xyz")

    def commit(self) -> None:
        """A commit without files, by a worker that other writers were in the way of."""
        self.turn += 1
        self.sink._pace.lost(2)
        expected = self.sink.stored("own")
        written = replace(NOTHING, output_schema=pa.schema([("id", pa.int64())]))
        outcome = self.sink.land(written, [entry("own", expected.number + 1, expected)])
        assert outcome.version is not None


@functools.cache
def table() -> _Table:
    """The one of this process."""
    return _Table()


def draw_folder(random: Random) -> list[dict[str, Any]]:
    """What is in the folder of announcements: names, kinds and contents."""
    found = []
    for _ in range(random.randrange(1, 4)):
        name = random.choice((f"{HEX}.json", f"{OTHER}.json", "x.json", "note.txt"))
        if random.random() < 0.1:
            name = values.text(random).replace("/", "-").replace("\0", "")[:60]
        content = _announcement(random)
        if random.random() < 0.3:
            content |= {"tableId": "t", "form": "d"}
            content["files"] = [{**SOUND_FILE, "rows": 3, "modifiedMillis": 99, "statistics": ""}]
            content["entries"] = [SOUND_ENTRY]
        kind = random.choice(("file",) * 6 + ("fifo", "link", "folder", "huge"))
        found.append({"name": name, "kind": kind, "body": raw_bytes(random, content)})
    return found


def check_folder(value: list[dict[str, Any]]) -> str:
    """A commit lands whatever is there; what landed with it has files of its own."""
    at = table()
    folder = at.root / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    layout = at.sink.delta_log.layout.digest.encode()
    table_id = at.sink.delta_log.table_id.encode()
    for one in value:
        body = one["body"].replace(b'"form":"d"', b'"form":"%s"' % layout)
        body = body.replace(b'"tableId":"t"', b'"tableId":"%s"' % table_id)
        _put(folder, {**one, "body": body.replace(b"app/a", b"app/a%d" % at.turn)})
    at.events.clear()
    version = DeltaTable(str(at.root)).version()
    at.commit()
    at.commit()
    rejected = [event for event in at.events if isinstance(event, AnnouncementRejected)]
    for event in rejected:
        assert (event.name + event.reason).isprintable()
        assert len(event.name + event.reason) < 1_500
    added = _paths_added(at.root, version)
    assert all(path.startswith(f"batches/b-{HEX}/") for path in added), added
    return "landed" if added else REFUSED if rejected else READ


def _put(folder: Path, one: Mapping[str, Any]) -> None:
    try:
        path = folder / one["name"]
        if one["name"] in ("", ".", "..") or os.path.lexists(path):
            return
        if one["kind"] == "fifo":
            os.mkfifo(path)
        elif one["kind"] == "link":
            path.symlink_to("/etc/passwd")
        elif one["kind"] == "folder":
            path.mkdir()
        else:
            path.write_bytes(one["body"])
            if one["kind"] == "huge":
                os.truncate(path, 100_000_000)
    except (OSError, UnicodeEncodeError):  # no name of a file
        return


def _paths_added(root: Path, after: int) -> list[str]:
    found = []
    for number in (after + 1, after + 2):
        entry = root / "_delta_log" / f"{number:020d}.json"
        for line in entry.read_text().splitlines():
            found += [action["path"] for action in [json.loads(line).get("add")] if action]
    return found


def draw_entry(random: Random) -> bytes:
    """An entry of a Delta log, with every kind of action."""
    txn = {
        "appId": random.choice(("app/a", values.text(random)[:100])),
        "version": random.choice((1, 2**63 - 1, 2**63, 1.0, "1", None, True, -(2**63))),
        "lastUpdated": 1,
    }
    actions: list[Any] = [
        {"commitInfo": {"timestamp": 1, "userMetadata": values.text(random)[:5_000]}},
        {"add": {"path": "a\u00e9", "stats": '{"numRecords":1,"txn":1}', "partitionValues": {}}},
        {"txn": txn if random.random() < 0.5 else {**txn, "version": 5}},
        {"txn": {"appId": "app/b", "version": 7}},
        {random.choice(("metaData", "protocol", "x")): random.choice(({}, None, {"a": 1}))},
    ]
    if random.random() < 0.3:
        actions = values.damaged(random, actions, values.json_leaf)
    lines = [
        json.dumps(one, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")
        for one in (actions if isinstance(actions, list) else [actions])
    ]
    entry = random.choice((b"\n", b"\n", b"\r\n")).join(lines)
    if random.random() < 0.1:
        entry = entry.replace(b'"txn"', b'"\\u0074xn"')
    if random.random() < 0.1:
        entry += b'\n{"x":' + values.nested("[", "]", 100_000).encode() + b',"txn":null}'
    return values.mutated(random, entry, DIGITS) if random.random() < 0.3 else entry


def check_entry(entry: bytes) -> str:
    """The transactions that a plain parser finds, or `ValueError`."""
    try:
        facts = entry_facts(entry)
    except ValueError:
        return REFUSED
    expected: dict[str, Any] = {}
    for line in entry.splitlines():
        try:
            action = json.loads(line)
        except (ValueError, RecursionError):
            continue  # without one of the keys a line is not parsed
        if isinstance(action, dict) and isinstance(action.get("txn"), dict):
            expected[action["txn"]["appId"]] = action["txn"]["version"]
    assert facts.transactions == expected
    assert all(type(one) is int for one in facts.transactions.values())
    return READ


@functools.cache
def _log_folder() -> Path:
    root = Path(tempfile.mkdtemp(prefix="fuzz-log-"))
    sink = Committer(DeltaSink(str(root)), "app")
    schema = pa.schema([("id", pa.int64())])
    sink.ensure(schema)
    for turn in (1, 2, 3):
        file = DataFile(f"batches/b-{HEX}/{turn}.parquet", 7, 1)
        batch = replace(NOTHING, files=(file,), output_schema=schema)
        sink.land(batch, [entry("a", turn, seq(turn - 1))])
        if turn == 2:
            DeltaTable(str(root)).create_checkpoint()
    return root


def draw_hint(random: Random) -> bytes:
    """The content of `_last_checkpoint`."""
    content: Any = {
        "version": random.choice((2, 2, 1, 3, 0, -1, 10**18, 10**30, "2", 2.0, None)),
        "size": 5,
        "parts": random.choice((None, None, 1, 2, 0, -1, 10**9, "1")),
        "sizeInBytes": 1,
    }
    return raw_bytes(random, content)


def check_hint(hint: bytes) -> str:
    """The numbers as they are, or none."""
    root = _log_folder()
    (root / "_delta_log" / "_last_checkpoint").write_bytes(hint)
    found = read_transactions(LocalStorage(root), 3)
    assert found is None or found[transaction_names("app/a")[1]] == 3
    return REFUSED if found is None else READ


BOUNDARIES: Final = (
    Boundary(
        "announcement",
        draw_announcement,
        check_announcement,
        frozenset({"fits", READ, REFUSED}),
    ),
    Boundary(
        "announcement_folder",
        draw_folder,
        check_folder,
        frozenset({"landed", READ, REFUSED}),
        cpu_seconds=10.0,
        megabytes=200,
        short_inputs=40,
    ),
    Boundary("delta_log_entry", draw_entry, check_entry, frozenset({READ, REFUSED})),
    Boundary(
        "checkpoint_hint", draw_hint, check_hint, frozenset({READ, REFUSED}), short_inputs=200
    ),
)
