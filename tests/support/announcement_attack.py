"""A table, a worker, and somebody who may write to the folder of announcements."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.events import AnnouncementRejected, Event
from kcl_pipeline.sinks.announcements import FOLDER
from kcl_pipeline.sinks.sink import CommitOutcome
from tests.support import announcing
from tests.support.delta_tables import Committer, NoWait, entry, ids, log_lines, written

SCHEMA = pa.schema([("id", pa.int64())])


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
        self.sink().ensure(SCHEMA)

    def sink(self) -> Committer:
        made = Committer(
            DeltaSink(self.uri),
            "app",
            clock=NoWait(),
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
            entry(key, 5),
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
        """A commit of a worker among others: of its own lease, by a new process."""
        self.turn += 1
        sink = self.sink()
        expected = sink.stored("own")
        return sink.land(written(self.uri, 100 + self.turn), [entry("own", self.turn, expected)])

    def rejections(self) -> list[AnnouncementRejected]:
        return [event for event in self.events if isinstance(event, AnnouncementRejected)]


def assert_harmless(attack: Attack, forged: Path | None = None) -> None:
    """Two commits and a takeover go on as if the forged announcement was not there."""
    assert attack.commit().version is not None
    assert attack.sink().move("z", 1)
    assert attack.sink().move("a", 1)
    assert attack.commit().version is not None
    assert ids(attack.uri) == [101, 102]
    added = [line["add"]["path"] for line in log_lines(attack.uri) if "add" in line]
    assert len(added) == 2
    assert len(attack.rejections()) == 1 if forged is None else attack.rejections()
    assert forged is None or not forged.exists()
