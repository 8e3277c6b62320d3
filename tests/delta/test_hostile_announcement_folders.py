"""Announcements that are large, many, no files, or refused by the log."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.schema import Field, PrimitiveType

from kcl_pipeline.delta import storage as local
from kcl_pipeline.delta.sink import DeltaTableLog
from kcl_pipeline.delta.storage import LocalStorage
from kcl_pipeline.sinks.announcements import (
    FOLDER,
    MAX_ANNOUNCEMENT_BYTES,
    MAX_HELD_BYTES,
    AnnouncementError,
    decoded,
)
from tests.support.announcement_attack import HEX, Attack, assert_harmless
from tests.support.delta_tables import entry, ids, seq, written


@pytest.fixture
def attack(tmp_path: Path) -> Attack:
    return Attack(tmp_path)


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


def test_many_large_ones_are_not_held_at_once(
    attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each can be an announcement, and never lands."""
    content = attack.honest(1)
    one = content["entries"][0]
    content["entries"] = [one | {"key": f"app/{n}{'x' * 1800}"} for n in range(500)]
    content["entries"][-1] |= {"expected": {"number": 3}, "becomes": {"number": 4}}
    content["files"] = []
    text = json.dumps(content | {"name": None}).replace(', "name": null', "")
    text = text.replace('"name": null, ', "")
    assert 900_000 < len(text) < MAX_ANNOUNCEMENT_BYTES
    for number in range(60):
        attack.put(text, f"{number:032x}")
    sink = attack.sink()
    read, sizes = local._read, list[int]()

    def noted(*arguments: Any) -> bytes:
        data = read(*arguments)
        sizes[-1] += len(data) if arguments[2].startswith(FOLDER) else 0
        return data

    monkeypatch.setattr(local, "_read", noted)
    for turn in range(1, 10):
        sizes.append(0)
        batch = written(attack.uri, 100 + turn)
        outcome = sink.land(batch, [entry("own", turn, seq(turn - 1))])
        assert outcome.version is not None
    assert MAX_HELD_BYTES // 2 < max(sizes) <= MAX_HELD_BYTES
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

    def denied(*_paths: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(local, "_read", noted)
    monkeypatch.setattr(sink.delta_log.storage, "delete", denied)
    for turn in range(1, 5):
        batch = written(attack.uri, 100 + turn)
        outcome = sink.land(batch, [entry("own", turn, seq(turn - 1))])
        assert outcome.version == turn
    assert path.exists()
    assert sum(one.endswith(f"{HEX}.json") for one in reads) == 1
    assert [event.removed for event in attack.rejections()] == [False]


def test_many_bad_ones_hide_no_good_one_for_long(attack: Attack) -> None:
    good = attack.honest(1)
    for number in range(250):
        attack.put(b"{}", f"{number:032x}")
    attack.put(good)
    for _ in range(4):
        assert attack.commit().version is not None
    assert 1 in ids(attack.uri)
    assert list((attack.root / FOLDER).iterdir()) == []


def test_an_event_has_one_short_printable_line(attack: Attack) -> None:
    folder = attack.root / FOLDER
    folder.mkdir(parents=True)
    (folder / "a\nERROR forged \x1b[31m.json").write_text("{}")
    attack.put(json.dumps({"x" * 100_000: 1}))
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
    monkeypatch.setattr(DeltaTableLog, "problem", lambda *_: None)
    create_new = LocalStorage.create_new

    def refuses(self: LocalStorage, path: str, data: bytes) -> None:
        if data.count(b'{"add":') > 1:
            raise ValueError("this is not a valid action")
        create_new(self, path, data)

    monkeypatch.setattr(LocalStorage, "create_new", refuses)
    assert_harmless(attack, path)
    assert [event.reason for event in attack.rejections()] == [
        "a commit that included it failed, and succeeded without it"
    ]


def test_an_announcement_from_before_a_change_of_the_schema_does_not_land(attack: Attack) -> None:
    attack.put(attack.honest(1))
    DeltaTable(attack.uri).alter.add_columns([Field("more", PrimitiveType("long"))])
    for _ in range(2):
        assert attack.commit().version is not None
    assert ids(attack.uri) == [101, 102]


def test_the_name_says_which_folder_is_the_announcers() -> None:
    content = {"tableId": "t", "form": "d", "files": [], "entries": []}
    for name in ("x", f"{FOLDER}/x.json", f"{FOLDER}/{HEX.upper()}.json", f"{FOLDER}/{HEX}.json2"):
        with pytest.raises(AnnouncementError):
            decoded(json.dumps(content).encode(), name)
