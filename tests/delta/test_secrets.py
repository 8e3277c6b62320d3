"""What a sink is given to reach its store is in no text that is made of it."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import pprint
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import obstore
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from rich.console import Console
from rich.pretty import pretty_repr

from kcl_pipeline.delta.object_store import ObjectStorage
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.delta.sink import DeltaCommitter
from kcl_pipeline.delta.storage import StorageOptions
from kcl_pipeline.errors import SettingsError, SinkError
from kcl_pipeline.foreach import ForeachBatchSink
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.spark.executors import _task_writer

SECRET = "hXq81tZsTopSecret/+"
OPTIONS = {
    "AWS_ACCESS_KEY_ID": "AKIA",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_SSE_CUSTOMER_KEY_BASE64": SECRET,
    "azure_storage_master_key": SECRET,
    "bearer": SECRET,
    "AWS_REGION": "eu-west-1",
}
PASSWORD = "hXq81tZsTopSecret%2F"
SINK = DeltaSink("s3://lake/orders", storage_options=OPTIONS)

HOLDERS: dict[str, Callable[[], Any]] = {
    "sink": lambda: SINK,
    "changed sink": lambda: dataclasses.replace(SINK, combined_commits=False),
    "copied sink": lambda: copy.deepcopy(SINK),
    "pickled sink": lambda: pickle.loads(pickle.dumps(SINK)),
    "fields": lambda: dataclasses.asdict(SINK),
    "function": lambda: ForeachBatchSink(print, storage_options=OPTIONS),
    "pipeline": lambda: KinesisPipeline(name="orders", streams=["s"], sink=SINK),
    "task": lambda: partial(_task_writer, None, "s3://lake/orders", (), SINK.storage_options),
    "committer": lambda: DeltaCommitter(SINK, "app"),
    "options": lambda: SINK.storage_options,
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS.keys())
@pytest.mark.parametrize("text_of", [repr, str, pprint.pformat, pretty_repr, "{0}".format])
def test_no_text_has_a_secret(holder: Callable[[], Any], text_of: Callable[[Any], str]) -> None:
    assert SECRET not in text_of(holder())
    assert SECRET not in text_of([holder()])


def test_the_names_are_shown() -> None:
    assert "'AWS_SECRET_ACCESS_KEY': '***'" in repr(SINK)
    assert "AWS_SECRET_ACCESS_KEY=***" in repr(SINK.storage_options)
    assert "s3://lake/orders" in repr(SINK)


def test_the_options_are_those_that_were_given() -> None:
    assert dict(SINK.storage_options) == OPTIONS
    assert SINK.storage_options == OPTIONS
    assert SINK.storage_options["AWS_REGION"] == "eu-west-1"
    assert pickle.loads(pickle.dumps(SINK)) == SINK
    assert dict(StorageOptions(SINK.storage_options)) == OPTIONS
    assert DeltaSink("t").storage_options == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"uri": f"s3://key:{PASSWORD}@lake/orders"},
        {"uri": "t", "dead_letter_uri": f"https://user:{PASSWORD}@host/x"},
    ],
)
def test_a_password_in_an_address_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="storage_options") as caught:
        DeltaSink(**settings)
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("uri", ["abfss://box@account.dfs.core.windows.net/t", "s3://b/a:b@c"])
def test_an_at_sign_is_no_password(uri: str) -> None:
    assert DeltaSink(uri).uri == uri


def test_an_error_of_the_store_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError(f"cannot sign with {SECRET}" + "x" * 10_000)

    storage = ObjectStorage("s3://lake/orders", OPTIONS)
    monkeypatch.setattr(obstore, "head", fails)
    with pytest.raises(OSError, match=r"cannot sign with \*\*\*") as caught:
        storage.size("x")
    assert len(str(caught.value)) < 1000
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_traceback_with_locals_has_no_secret(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run's failure is kept: the error with its causes."""
    sink = DeltaCommitter(DeltaSink(str(tmp_path / "t"), storage_options=OPTIONS), "app")

    def fails(*_: object, **__: object) -> None:
        raise ValueError(f"bad credentials {SECRET}")

    monkeypatch.setattr(DeltaTable, "create", fails)
    with pytest.raises(SinkError) as caught:
        sink.ensure(pa.schema([("id", pa.int64())]))
    text = "".join(traceback.format_exception(caught.value))
    assert SECRET not in text
    out = io.StringIO()
    Console(file=out, width=200).print(SINK, [SINK], {"sink": SINK})
    assert SECRET not in out.getvalue()
