"""Print the path of one batch: which modules each thread of a worker enters, and what carries it.

A worker polls one shard of the embedded AWS, which is another process, and writes with an Arrow
function to a Delta table in a temporary directory. When it is at the tip, records are put. From
then on until their checkpoint is in the lease row and the worker has reported, a profile function
notes the modules of the product in which a function is called. Threads of one kind are counted
together, and those of the leader apart from the others.

A class carries the batch if an instance of it is passed to a function of the product, or returned
by one, on the threads that fetch and process, and if it has fields with records, files or the
positions of the batch. Mutable objects, events and lease rows are not values of a batch.

    python -m tools.path [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import boto3
import pyarrow as pa

import kcl_pipeline
from kcl_pipeline.aws import AwsClients, SessionOptions
from kcl_pipeline.batch import DataFile
from kcl_pipeline.delta.sink import DeltaSink
from kcl_pipeline.events import BatchCommitted, Event
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.position import Position

PRODUCT: Final = f"{Path(kcl_pipeline.__file__).parent}/"
WORKER_PACKAGES: Final = ("worker/", "leases/")
SETTLED_SECONDS: Final = 60.0
STEADY_SECONDS: Final = 3.0
"""Time after the first batch. Then the worker is at the tip and has written its checkpoint."""
PERIOD_SECONDS: Final = 11.0
"""Time after the second batch: a renewal writes its checkpoint, and each periodic call is made."""
RECORDS: Final = 100

_KEYS: Final[dict[str, Any]] = {"aws_access_key_id": "k", "aws_secret_access_key": "s"}
_NO_VALUES: Final = (Position, Lease, Event)
_CONTAINERS: Final = (list, tuple, dict, set)


class Recorder:
    """Notes modules and values per kind of thread, while it is open. Install `note` before them."""

    def __init__(self) -> None:
        self.is_open = False
        self.modules: defaultdict[str, set[str]] = defaultdict(set)
        self._carriers: set[type] = {DataFile}

    def note(self, frame: FrameType, event: str, value: object) -> None:
        """Note a call or a return; see `threading.setprofile`."""
        if not self.is_open or event not in ("call", "return"):
            return
        file = frame.f_code.co_filename
        if not file.startswith(PRODUCT):
            return
        kind = kind_of(threading.current_thread().name)
        self.modules[kind].add(file.removeprefix(PRODUCT).removesuffix(".py"))
        if kind in ("fetch", "processing"):
            if event == "return":
                self._look(value)
            else:
                code = frame.f_code
                for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                    self._look(frame.f_locals.get(name))

    def _look(self, value: object) -> None:
        for item in _items(value):
            if _is_value(item) and any(self._carries(field) for field in _fields(item)):
                self._carriers.add(type(item))

    def _carries(self, value: object) -> bool:
        return any(
            isinstance(item, pa.Table | pa.RecordBatch | Position) or type(item) in self._carriers
            for item in _items(value)
        )

    def classes(self) -> list[str]:
        """Return the classes that carry the batch."""
        return sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in self._carriers)


def kind_of(thread: str) -> str:
    """Return the name of a thread without its number."""
    return re.sub(r"[-_ ]?\(?\d+.*$", "", thread)


def _items(value: object) -> Iterator[object]:
    """Yield the value, or what a container of it has. Large containers are not values."""
    if isinstance(value, _CONTAINERS) and not _is_named_tuple(value):
        items = list(value.values()) if isinstance(value, dict) else list(value)
        yield from items[:8]
    else:
        yield value


def _is_named_tuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_value(value: object) -> bool:
    kind = type(value)
    if not kind.__module__.startswith("kcl_pipeline.") or isinstance(value, _NO_VALUES):
        return False
    if _is_named_tuple(value):
        return True
    parameters = getattr(kind, "__dataclass_params__", None)
    return bool(parameters is not None and parameters.frozen)


def _fields(value: Any) -> Iterator[object]:
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    for name in value._fields if _is_named_tuple(value) else [field.name for field in fields]:
        yield getattr(value, name, None)


@contextmanager
def embedded_aws() -> Iterator[str]:
    """Run the embedded AWS in another process; yield its URL."""
    command = [sys.executable, "-m", "kcl_pipeline.local", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip() if process.stdout else ""
        finally:
            process.terminate()


def run_batch(recorder: Recorder, folder: str) -> None:
    """Run a worker; record the second batch that it commits."""
    committed = threading.Event()

    def note(event: Event) -> None:
        if isinstance(event, BatchCommitted):
            committed.set()

    with embedded_aws() as url:
        kinesis = boto3.client("kinesis", endpoint_url=url, region_name="us-east-1", **_KEYS)
        kinesis.create_stream(StreamName="orders", ShardCount=1)

        def put() -> None:
            committed.clear()
            entries: list[Any] = [
                {"Data": b"%d" % n, "PartitionKey": str(n)} for n in range(RECORDS)
            ]
            kinesis.put_records(StreamName="orders", Records=entries)
            if not committed.wait(SETTLED_SECONDS):
                raise SystemExit(f"the batch was not committed within {SETTLED_SECONDS:.0f} s")

        pipeline = KinesisPipeline(
            name="path",
            streams=["orders"],
            sink=DeltaSink(folder),
            transform_arrow=lambda table: table,
            settings_overrides={"shard_sync": {"initial_position_in_stream": "TRIM_HORIZON"}},
        )
        clients = AwsClients(
            pipeline.settings, SessionOptions("us-east-1", endpoint_url=url, **_KEYS)
        )
        stop = threading.Event()
        threading.setprofile(recorder.note)
        worker = pipeline.build_worker("path-1", clients=clients, events=note)
        thread = threading.Thread(target=worker.run, args=(stop,), name="main")
        thread.start()
        try:
            put()
            time.sleep(STEADY_SECONDS)
            recorder.is_open = True
            put()
            time.sleep(PERIOD_SECONDS)
            recorder.is_open = False
        finally:
            stop.set()
            thread.join(SETTLED_SECONDS)
            threading.setprofile(None)


def result(modules: Mapping[str, AbstractSet[str]], classes: Sequence[str]) -> dict[str, Any]:
    """Return the figures and the lists, ready for JSON."""
    others = {kind: names for kind, names in modules.items() if not kind.startswith("leader")}
    processing = modules.get("processing", set())
    return {
        "modules": len(set().union(*others.values())),
        "worker_and_leases_when_processing": sum(
            name.startswith(WORKER_PACKAGES) for name in processing
        ),
        "classes": list(classes),
        "threads": {kind: sorted(names) for kind, names in sorted(modules.items())},
    }


def text(of: Mapping[str, Any]) -> str:
    """Return the result as lines."""
    lines = []
    for kind, names in of["threads"].items():
        lines += [f"{kind}: {len(names)} modules", *(f"    {name}" for name in names)]
    lines += ["classes that carry the batch:", *(f"    {name}" for name in of["classes"])]
    lines.append(
        f"{of['modules']} modules without the leader, "
        f"{of['worker_and_leases_when_processing']} of worker/ and leases/ on the thread that "
        f"processes, {len(of['classes'])} classes"
    )
    return "\n".join(lines)


def main() -> None:
    """Run one batch and print its path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    arguments = parser.parse_args()
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        run_batch(recorder, folder)
    of = result(recorder.modules, recorder.classes())
    print(json.dumps(of) if arguments.json else text(of))


if __name__ == "__main__":
    main()
