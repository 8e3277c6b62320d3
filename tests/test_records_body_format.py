"""In which form GetRecords is asked for: by the size of the stream's records, or as the settings say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from local_aws import ZERO, client

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import RetrievalSettings, ShardSyncSettings
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.records.boto import BotoKinesis
from kcl_pipeline.records.columns import MIN_BYTES
from kcl_pipeline.shards import StreamId


class Asked:
    """What a client sent and got, by content type."""

    def __init__(self, aws: EmbeddedAws, body_format: str) -> None:
        boto = client(aws)
        self.types: list[str] = []
        self.kinesis = BotoKinesis(boto, RetrievalSettings(body_format=body_format), ShardSyncSettings(), SystemClock())
        boto.meta.events.register("before-send.kinesis.GetRecords", self._note)

    def _note(self, request: Any, **_: object) -> None:
        kind = request.headers["Content-Type"]
        self.types.append((kind if isinstance(kind, str) else kind.decode()).removeprefix("application/x-amz-").removesuffix("-1.1"))

    def read(self, stream: str) -> list[bytes]:
        where = StreamId(stream)
        iterator = self.kinesis.get_shard_iterator(where, ZERO, "TRIM_HORIZON")
        data: list[bytes] = self.kinesis.get_records(where, ZERO, iterator, 10_000).records.column("data").to_pylist()
        return data


@pytest.fixture
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as running:
        for name, size in (("small", 100), ("large", 10_000)):
            running.kinesis.create_stream(name)
            running.kinesis.put(name, [("k", bytes([i]) * size) for i in range(3)])
        running.kinesis.create_stream("empty")
        yield running


def test_auto_asks_for_cbor_once_the_records_are_known_to_be_large(aws: EmbeddedAws) -> None:
    asked = Asked(aws, "auto")
    for name, kinds in (("small", ["json", "json"]), ("large", ["json", "cbor"]), ("empty", ["json", "json"])):
        asked.types.clear()
        assert asked.read(name) == asked.read(name)
        assert asked.types == kinds


@pytest.mark.parametrize("body_format", ["json", "cbor"])
def test_a_setting_is_kept_to(aws: EmbeddedAws, body_format: str) -> None:
    asked = Asked(aws, body_format)
    for name in ("small", "large", "large", "empty"):
        asked.read(name)
    assert asked.types == [body_format] * 4


def test_a_long_answer_is_read_without_a_parser_and_equal_in_both_forms(aws: EmbeddedAws, monkeypatch: pytest.MonkeyPatch) -> None:
    aws.kinesis.create_stream("long")
    for _ in range(4):
        aws.kinesis.put("long", [(f"k{i}", bytes([i % 251]) * (900 + i)) for i in range(300)])
    as_cbor = Asked(aws, "cbor").read("long")
    found: list[bool] = []
    from kcl_pipeline.records import decode  # noqa: PLC0415 (only here)

    real = decode.columns_of

    def columns_of(body: bytes) -> Any:
        columns = real(body)
        found.append(columns is not None and len(body) > MIN_BYTES)
        return columns

    monkeypatch.setattr(decode, "columns_of", columns_of)
    assert Asked(aws, "json").read("long") == as_cbor
    assert found == [True]
    assert len(as_cbor) == 1200
