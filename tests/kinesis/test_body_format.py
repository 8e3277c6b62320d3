"""Body format of GetRecords: by the size of responses and records, or by the settings."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import cbor2
import pytest

from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.config import RetrievalSettings, ShardSyncSettings
from kcl_pipeline.errors import InvalidRequestError, UnavailableError
from kcl_pipeline.kinesis import decode
from kcl_pipeline.kinesis.boto import CBOR_TRIALS, JSON_SECONDS, BotoKinesis
from kcl_pipeline.kinesis.decode import MIN_BYTES
from kcl_pipeline.local import EmbeddedAws
from kcl_pipeline.local.faults import Fault, FaultRule
from kcl_pipeline.local.kinesis import codec
from kcl_pipeline.shards import StreamId
from kcl_pipeline.testing.clock import ShiftedClock
from tests.support.local_aws import ZERO, client


class Asked:
    """Content types of the requests and responses of a client."""

    def __init__(self, aws: EmbeddedAws, body_format: str, clock: Clock | None = None) -> None:
        made = client(aws)
        self.types: list[str] = []
        self.kinesis = BotoKinesis(
            made,
            RetrievalSettings(body_format=body_format),
            ShardSyncSettings(),
            clock or SystemClock(),
        )
        made.meta.events.register("before-send.kinesis.GetRecords", self._note)

    def _note(self, request: Any, **_: object) -> None:
        kind = request.headers["Content-Type"]
        self.types.append(
            (kind if isinstance(kind, str) else kind.decode())
            .removeprefix("application/x-amz-")
            .removesuffix("-1.1")
        )

    def read(self, stream: str) -> list[bytes]:
        where = StreamId(stream)
        iterator = self.kinesis.get_shard_iterator(where, ZERO, "TRIM_HORIZON")
        data: list[bytes] = (
            self.kinesis.get_records(where, ZERO, iterator, 10_000)
            .records.column("data")
            .to_pylist()
        )
        return data


@pytest.fixture
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as running:
        for name, size in (("small", 100), ("large", 10_000)):
            running.kinesis.create_stream(name)
            running.kinesis.put(name, [("k", bytes([i]) * size) for i in range(3)])
        running.kinesis.create_stream("empty")
        yield running


def test_auto_requests_cbor_once_the_records_are_known_to_be_large(aws: EmbeddedAws) -> None:
    asked = Asked(aws, "auto")
    for name, kinds in (
        ("small", ["json", "json"]),
        ("large", ["json", "cbor"]),
        ("empty", ["json", "json"]),
    ):
        asked.types.clear()
        assert asked.read(name) == asked.read(name)
        assert asked.types == kinds


def fill(aws: EmbeddedAws, stream: str) -> None:
    """More than half a megabyte of small records."""
    aws.kinesis.create_stream(stream)
    for _ in range(4):
        aws.kinesis.put(stream, [(f"k{i}", bytes([i % 251]) * (900 + i)) for i in range(300)])


def test_auto_requests_cbor_while_responses_are_long(aws: EmbeddedAws) -> None:
    fill(aws, "long")
    asked = Asked(aws, "auto")
    assert asked.read("long") == asked.read("long")
    assert asked.types == ["json", "cbor"]
    asked.read("small")
    asked.read("small")
    assert asked.types == ["json", "cbor", "json", "json"], "each stream has its own"


def test_auto_stops_requesting_cbor_if_no_response_is_cbor() -> None:
    def json_only(_service: str, operation: str, body: bytes) -> Fault | None:
        return (
            Fault("throttle", "SerializationException")
            if operation == "GetRecords" and not body.startswith(b"{")
            else None
        )

    with EmbeddedAws(faults=json_only) as aws:
        fill(aws, "long")
        asked = Asked(aws, "auto")
        whole = asked.read("long")
        for _ in range(CBOR_TRIALS):
            with pytest.raises(InvalidRequestError):
                asked.read("long")
        assert asked.read("long") == asked.read("long") == whole
        assert asked.types == ["json", *["cbor"] * CBOR_TRIALS, "json", "json"]


def test_auto_keeps_cbor_that_has_worked(aws: EmbeddedAws) -> None:
    fill(aws, "long")
    asked = Asked(aws, "auto")
    asked.read("long")
    whole = asked.read("long")
    aws.fault_rules.replace([FaultRule(operation="GetRecords", kind="error500", count=CBOR_TRIALS)])
    for _ in range(CBOR_TRIALS):
        with pytest.raises(UnavailableError):
            asked.read("long")
    asked.types.clear()
    assert asked.read("long") == whole
    assert asked.types == ["cbor"]


def as_base64(records: list[dict[str, Any]]) -> None:
    """kinesis-mock and LocalStack: the data is text in base64."""
    for record in records:
        record["Data"] = base64.b64encode(record["Data"]).decode()


def as_buffer(records: list[dict[str, Any]]) -> None:
    """kinesalite: the data is the JSON of a buffer of Node."""
    for record in records:
        record["Data"] = {"type": "Buffer", "data": list(record["Data"])}


def as_text(records: list[dict[str, Any]]) -> None:
    """ministack: the data is text."""
    for record in records:
        record["Data"] = record["Data"].decode("latin-1")


@pytest.fixture(params=[as_base64, as_buffer, as_text])
def foreign(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded AWS writes records in CBOR as another server does."""
    encode = codec.encode_read

    def encode_read(content_type: str, read: Any) -> bytes:
        body = encode(content_type, read)
        if content_type != codec.CBOR:
            return body
        response = cbor2.loads(body, semantic_decoders={1: lambda value, *_: value})
        request.param(response["Records"])
        return cbor2.dumps(response)

    monkeypatch.setattr(codec, "encode_read", encode_read)


@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize("body_format", ["auto", "cbor"])
def test_cbor_that_cannot_be_read_is_read_as_json_also_after_pages_without_records(
    aws: EmbeddedAws, body_format: str
) -> None:
    fill(aws, "long")
    whole = Asked(aws, "json").read("long")
    asked = Asked(aws, body_format)
    assert asked.read("empty") == []
    for _ in range(3):
        assert asked.read("long") == whole
    assert asked.types.count("cbor") <= 2
    assert asked.types[-1] == "json"


def test_a_body_that_was_damaged_once_does_not_end_cbor(
    aws: EmbeddedAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(aws, "long")
    clock = ShiftedClock()
    asked = Asked(aws, "cbor", clock)
    whole = asked.read("long")
    with monkeypatch.context() as patch:
        encode = codec.encode_read
        patch.setattr(codec, "encode_read", lambda kind, read: encode(kind, read)[: len(kind)])
        with pytest.raises(UnavailableError):
            asked.read("long")
    assert asked.read("long") == whole
    assert asked.types == ["cbor", "cbor", "json", "json"]
    clock.advance(JSON_SECONDS)
    assert asked.read("long") == whole
    assert asked.types[-1] == "cbor"


def test_failures_of_the_network_do_not_end_cbor(aws: EmbeddedAws) -> None:
    fill(aws, "long")
    asked = Asked(aws, "auto")
    whole = asked.read("long")
    aws.fault_rules.replace(
        [FaultRule(operation="GetRecords", kind="drop_after", count=2 * CBOR_TRIALS)]
    )
    for _ in range(2 * CBOR_TRIALS):
        with pytest.raises(UnavailableError):
            asked.read("long")
    asked.types.clear()
    assert asked.read("long") == whole
    assert asked.types == ["cbor"]


@pytest.mark.parametrize("body_format", ["json", "cbor"])
def test_a_setting_is_kept_to(aws: EmbeddedAws, body_format: str) -> None:
    asked = Asked(aws, body_format)
    for name in ("small", "large", "large", "empty"):
        asked.read(name)
    assert asked.types == [body_format] * 4


def test_a_long_response_is_read_without_a_parser_and_equal_in_both_forms(
    aws: EmbeddedAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(aws, "long")
    found: list[tuple[str, bool]] = []

    def noted(name: str) -> Any:
        real = getattr(decode, name)

        def columns_of(body: bytes) -> Any:
            columns = real(body)
            found.append((name, columns is not None and len(body) > MIN_BYTES))
            return columns

        return columns_of

    for name in ("columns_of", "cbor_columns_of"):
        monkeypatch.setattr(decode, name, noted(name))
    as_cbor = Asked(aws, "cbor").read("long")
    assert Asked(aws, "json").read("long") == as_cbor
    assert found == [("cbor_columns_of", True), ("columns_of", True)]
    assert len(as_cbor) == 1200
