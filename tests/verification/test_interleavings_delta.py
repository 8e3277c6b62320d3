"""The explorer over the Delta log itself."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from kcl_pipeline.batch import Batch, DataFile
from kcl_pipeline.delta.maintenance import vacuum
from kcl_pipeline.delta.sink import DeltaCommitter, DeltaSink
from kcl_pipeline.errors import SinkError
from kcl_pipeline.position import StoredPosition
from kcl_pipeline.sinks.sink import CommitOutcome, Positions, Sink, TableSink
from kcl_pipeline.testing.sink import FaultHook, SinkFault
from verification.interleavings.explorer import Actor, Turns, Violation, explore
from verification.interleavings.ranges import RangeWriter, range_of
from verification.interleavings.scenarios import scenarios
from verification.interleavings.stepping import StepClock
from verification.interleavings.world import Bench, Process, Scenario

ALL = {scenario.name: scenario for scenario in scenarios()}

ZOMBIE = replace(ALL["a paused writer"], preemptions=2)


class SteppedDelta(DeltaCommitter):
    """A real committer that may be overtaken before each call and between its look at the log and
    its write; its answers get lost as told.
    """

    def __init__(self, uri: str, turns: Turns, faults: FaultHook) -> None:
        super().__init__(DeltaSink(uri), "app", clock=StepClock(turns), rng=random.Random(1))
        self._turns, self._faults, self._fault = turns, faults, None
        append = self._log._log.append

        def stepped(files: Sequence[DataFile], transactions: dict[str, int]) -> None:
            fault, self._fault = self._fault, None
            self._turns.give_way("append")
            if fault is SinkFault.FAIL:
                raise SinkError("failed on demand")
            append(files, transactions)

        self._log._log.append = stepped

    def _call(self, operation: str, call: Callable[[], object]) -> object:
        self._turns.give_way(operation)
        fault = self._faults(operation, ())
        self._fault = fault if fault is SinkFault.FAIL else None
        answer = call()
        if fault is SinkFault.LAND_AND_FAIL:
            raise SinkError("the answer was lost on demand; the entry landed")
        return answer

    def positions(self, keys: Sequence[str]) -> Positions:
        return self._call("positions", lambda: super(SteppedDelta, self).positions(keys))

    def commit(
        self,
        table_id: str | None,
        files: Sequence[DataFile],
        expected: Mapping[str, StoredPosition],
        becomes: Mapping[str, StoredPosition],
        schema: pa.Schema | None = None,
    ) -> CommitOutcome:
        return self._call(
            "commit",
            lambda: super(SteppedDelta, self).commit(table_id, files, expected, becomes, schema),
        )


class FileWriter(RangeWriter):
    """Real files, one row per record."""

    def __init__(self, uri: str) -> None:
        super().__init__()
        self._uri = uri

    def write(self, batch: Batch) -> Batch:
        written = super().write(batch)
        files = []
        for file in written.written_files:
            _, after, through = range_of(file.path)
            path = Path(self._uri, file.path.replace("/", "_") + ".parquet")
            pq.write_table(
                pa.table({"id": pa.array(range(after + 1, through + 1), pa.int64())}), path
            )
            files.append(
                replace(file, path=path.name, size=path.stat().st_size, rows=through - after)
            )
        return replace(written, files=tuple(files))


class DeltaBench(Bench):
    """The bench on a Delta table; `vacuums`: somebody checkpoints the log, cleans it up and removes
    unused files, at any moment.
    """

    def __init__(self, scenario: Scenario, uri: str, *, vacuums: bool = False) -> None:
        self.uri = uri
        super().__init__(scenario)
        self.writer = FileWriter(uri)
        for actor in self.actors:
            process = getattr(actor.body, "__self__", None)
            if isinstance(process, Process):
                process._writer = self.writer
                process._steps._rewrite = self.writer.write
        if vacuums:
            self.actors.append(Actor("vacuum", self._vacuum))

    def sink_for(self, faults: FaultHook) -> Sink:
        return SteppedDelta(self.uri, self.turns, faults)

    def ranges(self) -> Sequence[tuple[str, int, int]]:
        found = []
        for entry in sorted(Path(self.uri, "_delta_log").glob("*.json")):
            actions = [json.loads(line) for line in entry.read_text().splitlines()]
            found += [
                range_of(
                    a["add"]["path"].replace("%7E", "~").replace("_", "/").removesuffix(".parquet")
                )
                for a in actions
                if "add" in a
            ]
        return found

    def _vacuum(self) -> None:
        DeltaTable(self.uri).create_checkpoint()
        DeltaTable(self.uri).cleanup_metadata()
        vacuum(self.uri)

    def check(self) -> None:
        self._seen = ()
        super().check()

    def finish(self) -> None:
        super().finish()
        ids = sorted(DeltaTable(self.uri).to_pyarrow_table()["id"].to_pylist())
        assert ids == list(range(1, self.scenario.records + 1)), "what a reader of the table sees"


DELTA = {
    "a paused writer": (ALL["a paused writer"], False),
    "the table is vacuumed meanwhile": (
        replace(ALL["one worker"], name="vacuumed", records=4),
        True,
    ),
    "the table is vacuumed beside a paused writer": (
        replace(ALL["a paused writer"], name="vacuumed"),
        True,
    ),
    "a commit that landed but reported failure": (
        ALL["commit 1 of the old owner: land_and_fail"],
        False,
    ),
    "a commit that failed": (ALL["commit 2 of the old owner: fail"], False),
}


LONG = {
    "a commit that failed",
    "a commit that landed but reported failure",
    "the table is vacuumed beside a paused writer",
}
"""`test_interleavings` has the first two on a log in memory, in `make test`, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in DELTA]
)
def test_the_delta_log_is_exactly_once_too(name: str, tmp_path: Path) -> None:
    scenario, vacuums = DELTA[name]
    numbers = itertools.count()

    def make() -> Bench:
        return DeltaBench(scenario, str(tmp_path / f"t{next(numbers)}"), vacuums=vacuums)

    found = explore(make, preemptions=1)
    print(f"Delta, {name}: {found.schedules} schedules, {found.steps} steps")
    assert found.schedules >= 40


def test_the_delta_bench_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TableSink, "_decided", lambda *_: None)
    numbers = itertools.count()
    with pytest.raises(Violation, match="repeated records"):
        explore(lambda: DeltaBench(ZOMBIE, str(tmp_path / f"t{next(numbers)}")), preemptions=2)
