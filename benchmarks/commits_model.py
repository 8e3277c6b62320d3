"""Combined commits in virtual time: many writers of one table in a model of an object store.

`benchmarks.commits --store s3` measures the embedded S3, which is one Python process, on a machine
that also runs all writers. Here no time passes, so the load of the machine changes nothing. The
committer is that of the product (`sinks.sink.TableSink`, with its announcements) over a log in
memory. A request takes `--latency` milliseconds on the network. Then the server serves one request
at a time, `--cost` milliseconds each, a listing three times as long. Faults are those of
`benchmarks.commits`: 0.2 % of the requests have their effect and no answer, 0.2 % are answered 503,
and 0.1 % find expired credentials. The client repeats the first two kinds after 0.1 to 0.2 s, but
for the creation of an entry of the log.

    python -m benchmarks.commits_model [--writers 1 32] [--seconds 60] [--latency 20] [--cost 1.7]
    [--seed 1]
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from typing import Any

import greenlet
import pyarrow as pa

from kcl_pipeline.batch import DataFile
from kcl_pipeline.errors import SinkError
from kcl_pipeline.position import NOTHING_STORED, Position, StoredPosition
from kcl_pipeline.sinks.announcements import AnnouncementStore
from kcl_pipeline.sinks.log import Head, StoredObject
from kcl_pipeline.sinks.sink import TableSink

LOST, REFUSED, EXPIRED = 0.002, 0.002, 0.001
LISTING = 3


class World:
    """Virtual time: a writer runs until it waits. It is the `Clock` of all writers."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, Any]] = []
        self._hub: Any = None

    def spawn(self, call: Callable[[], object]) -> None:
        heapq.heappush(self._waiting, (self.now, next(self._numbers), greenlet.greenlet(call)))

    def run(self, until: float) -> None:
        """Run everything up to this time."""
        self._hub = greenlet.getcurrent()
        while self._waiting and self._waiting[0][0] <= until:
            self.now, _, who = heapq.heappop(self._waiting)
            who.switch()

    def wait_until(self, when: float) -> None:
        heapq.heappush(self._waiting, (when, next(self._numbers), greenlet.getcurrent()))
        self._hub.switch()

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now

    def sleep(self, seconds: float) -> None:
        self.wait_until(self.now + seconds)

    def signal(self) -> Any:
        raise NotImplementedError

    def lock(self) -> AbstractContextManager[object]:
        return nullcontext()


@dataclass
class Server:
    """The object store: the entries of one log, and the announcements."""

    world: World
    latency: float
    cost: float
    rng: random.Random
    entries: list[tuple[Sequence[DataFile], Mapping[str, StoredPosition]]] = field(
        default_factory=list
    )
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    requests: int = 0
    _free_at: float = 0.0

    def request(
        self,
        effect: Callable[[], Any],
        *,
        cost: float = 1.0,
        repeats: bool = True,
        together: int = 1,
    ) -> Any:
        """Serve a request, or several that are sent together, and return what its effect does."""
        while True:
            self.requests += together
            self.world.sleep(self.latency)
            self._free_at = max(self._free_at, self.world.now) + self.cost * cost * together
            self.world.wait_until(self._free_at)
            draw = self.rng.random() / together
            if draw < EXPIRED:
                raise OSError("the credentials have expired")
            if draw < EXPIRED + LOST:
                effect()
                if not repeats:
                    raise OSError("the answer was lost")
            elif draw > EXPIRED + LOST + REFUSED:
                return effect()
            self.world.sleep(self.rng.uniform(0.1, 0.2))


@dataclass(frozen=True)
class ModelHead:
    """The `Head` of the log."""

    version: int
    changed: int
    positions: Mapping[str, StoredPosition]
    table_id: str = "table"
    form: str = "form"

    def stored(self, key: str) -> StoredPosition:
        return self.positions.get(key, NOTHING_STORED)


class ModelLog:
    """A `Log` that asks the server as `delta.sink.DeltaTableLog` asks its store."""

    name = "model"

    def __init__(self, server: Server) -> None:
        self._server = server
        self._head = ModelHead(0, 0, {})

    def ensure(self, schema: pa.Schema) -> bool:
        return False

    def read(self) -> ModelHead:
        found = self._server.request(self._entry, together=2)  # the last one, and the next one
        while found is not None:
            self._follow(found)
            found = self._server.request(self._entry)
        return self._head

    def peek(self) -> ModelHead:
        try:
            found = self._server.request(self._entry)
        except OSError:
            found = None
        if found is not None:
            self._follow(found)
        return self._head

    def add(
        self, head: Head, files: Sequence[DataFile], sets: Mapping[str, StoredPosition]
    ) -> None:
        def create() -> bool:
            if len(self._server.entries) != head.version:
                return False
            self._server.entries.append((files, sets))
            return True

        if not self._server.request(create, repeats=False):
            raise SinkError("the entry exists")
        self._follow((files, sets))

    def batch_name(self, files: Sequence[DataFile]) -> str:
        return files[0].path

    def problem(self, name: str, files: Sequence[DataFile]) -> None:
        return None

    def upkeep(self, version: int) -> None:
        pass

    def _entry(self) -> Any:
        entries = self._server.entries
        return entries[self._head.version] if len(entries) > self._head.version else None

    def _follow(self, entry: tuple[Sequence[DataFile], Mapping[str, StoredPosition]]) -> None:
        _, sets = entry
        self._head = ModelHead(self._head.version + 1, len(sets), {**self._head.positions, **sets})


class ModelObjects:
    """The `ObjectStore` of the announcements."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def read_each(
        self, folder: str, names: Iterable[str], limit: int
    ) -> Iterator[tuple[str, bytes | OSError]]:
        paths = [f"{folder}/{name}" for name in names]
        if not paths:
            return
        known = self._server.objects
        found = self._server.request(lambda: [known.get(one) for one in paths], together=len(paths))
        for path, stored in zip(paths, found, strict=True):
            yield path, FileNotFoundError(path) if stored is None else stored[0]

    @contextmanager
    def create(self, path: str, *, durable: bool = True) -> Iterator[BytesIO]:
        stream = BytesIO()
        yield stream
        stored = stream.getvalue(), self._server.world.now
        self._server.request(lambda: self._server.objects.__setitem__(path, stored))

    def list(self, folder: str, limit: int | None = None) -> list[StoredObject]:
        found: Mapping[str, tuple[bytes, float]] = self._server.request(
            lambda: dict(self._server.objects), cost=LISTING
        )
        return [StoredObject(path, len(data), 0) for path, (data, _) in sorted(found.items())]

    def map(self, call: Callable[[Any], Any], items: Sequence[Any]) -> Sequence[Any]:
        return [call(item) for item in items]

    def delete(self, *paths: str) -> None:
        self._server.request(lambda: [self._server.objects.pop(path, None) for path in paths])


def repeated(world: World, call: Callable[[], Any]) -> Any:
    """Call until the store works, as a worker does."""
    attempt = 0
    while True:
        try:
            return call()
        except (OSError, SinkError):
            world.sleep(min(0.05 * 2**attempt, 1.0))
            attempt += 1


def measure(writers: int, seconds: float, server: Server, seed: int) -> dict[str, float]:
    """Run so many writers for so long, and compare the log with what they committed."""
    world = server.world
    millis: list[float] = []
    committed: list[str] = []

    def write(number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        sink = TableSink(
            ModelLog(server),
            "model",
            dead_letters=lambda _: None,
            announcements=AnnouncementStore(ModelObjects(server)),
            clock=world,
            rng=rng,
        )
        stored = {f"{number}-{name}": NOTHING_STORED for name in "xy"}
        for turn in itertools.count(1):
            file = DataFile(f"{rng.getrandbits(128):032x}", 1, 1, {}, 0, "")
            repeated(world, lambda: server.request(lambda: None))
            becomes = {key: one.moved(Position(str(turn))) for key, one in stored.items()}
            before = world.now
            outcome = repeated(world, partial(sink.commit, "table", [file], stored, becomes))
            if outcome.version is None:
                raise AssertionError(f"writer {number} was refused {outcome.refused}")
            if world.now <= seconds:
                millis.append((world.now - before) * 1000)
                committed.append(file.path)
            stored = becomes

    for number in range(writers):
        world.spawn(partial(write, number))
    world.run(seconds)
    added = [file.path for files, _ in server.entries for file in files]
    millis.sort()
    return {
        "batches_per_s": round(len(millis) / seconds, 1),
        "p50_ms": round(statistics.median(millis)),
        "p99_ms": round(millis[int(len(millis) * 0.99)]),
        "max_ms": round(millis[-1]),
        "requests_per_batch": round(server.requests / len(millis), 1),
        "missing": len(set(committed) - set(added)),
        "repeated": len(added) - len(set(added)),
    }


def main() -> None:
    """Print one line for each number of writers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--latency", type=float, default=20.0)
    parser.add_argument("--cost", type=float, default=1.7)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    for writers in given.writers:
        rng = random.Random(given.seed)
        server = Server(World(), given.latency / 1000, given.cost / 1000, rng)
        cell = measure(writers, given.seconds, server, given.seed)
        text = ", ".join(f"{name} {value}" for name, value in cell.items())
        print(f"{writers:>3} writers: {text}", flush=True)


if __name__ == "__main__":
    main()
