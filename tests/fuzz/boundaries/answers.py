"""Answers of DynamoDB's API, as an endpoint sends them (bodies of HTTP)."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable
from io import BytesIO
from random import Random
from typing import Any, Final

import boto3
from botocore.awsrequest import AWSResponse

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.config import TableSettings
from kcl_pipeline.errors import AwsError
from kcl_pipeline.leases.dynamodb import OWNER_INDEX, DynamoDbStore, TableShape
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.testing.tables import create_lease
from tests.fuzz import values
from tests.fuzz.boundaries.rows import LEASE, READ, REFUSED, SHARD, row_like
from tests.fuzz.boundary import Boundary

NUMBER_OF_CALLS: Final = 5
MAX_BODY_BYTES: Final = 1_500_000
"""DynamoDB: a page of a scan has 1 MB of items."""


class Endpoint:
    """A client whose every call gets the same answer; nothing is sent."""

    def __init__(self) -> None:
        self.status, self.body = 200, b""
        self.client = boto3.client(
            "dynamodb",
            region_name="us-east-1",
            endpoint_url="http://localhost:1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
            config=boto3.session.Config(retries={"total_max_attempts": 1, "mode": "standard"}),
        )
        self.client.meta.events.register("before-send.dynamodb", self._answer)
        shape = TableShape("t", "leaseKey", OWNER_INDEX)
        self.store = DynamoDbStore(
            self.client, shape, TableSettings(), SystemClock(), scan_segments=1
        )
        self.table = LeaseTable(self.store)

    def _answer(self, request: Any, **_: Any) -> AWSResponse:
        return AWSResponse(request.url, self.status, {}, _Raw(self.body))


class _Raw(BytesIO):
    """What botocore reads a body from."""

    def stream(self, *_: object, **__: object) -> list[bytes]:
        return [self.getvalue()]


@functools.cache
def endpoint() -> Endpoint:
    """The one of this process: a client takes long to make."""
    return Endpoint()


def _wire(value: Any) -> Any:
    """Bytes as base64, as they are in JSON."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, dict):
        return {name: _wire(part) for name, part in value.items()}
    return [_wire(part) for part in value] if isinstance(value, list) else value


def draw(random: Random) -> dict[str, Any]:
    """A status, the number of the call, and a body: nearly right, nested deeply, or broken."""
    item = _wire(row_like(LEASE)(random))
    body: Any = {
        "Item": item,
        "Attributes": item,
        "Items": [item] * random.randrange(3),
        "Count": 1,
    }
    if random.random() < 0.1:
        body["LastEvaluatedKey"] = {"leaseKey": {"S": SHARD}}
    status = random.choice((200, 200, 200, 400, 400, 500, 301, 100, 999))
    if status == 400:
        kinds = ("ConditionalCheckFailedException", "ThrottlingException", "x", values.text(random))
        body = {"__type": random.choice(kinds), "message": values.text(random), "Item": item}
    text = json.dumps(body)
    kind = random.randrange(6)
    if kind == 0:
        text = json.dumps(values.damaged(random, body, values.json_leaf))
    elif kind == 1:
        depth = random.choice((30, 900, 1_100, 100_000))
        deep = random.choice((("[", "]"), ('{"a":', "}"), ('{"L":[', "]}"), ('{"M":{"a":', "}}")))
        inner = values.nested(*deep, depth, "1")
        text = text.replace('"w1"', inner, 1) if random.random() < 0.5 else inner
    raw = text.encode("utf-8", "surrogatepass")
    if kind == 2:
        raw = values.mutated(random, raw, (b'{"S":', b"NaN", b"1e999", b"\\ud800", b"\x00"))
    raw = raw[:MAX_BODY_BYTES]
    return {"call": random.randrange(NUMBER_OF_CALLS), "status": status, "body": raw}


def check(value: dict[str, Any]) -> str:
    """Every answer is rows or an `AwsError`."""
    asked = endpoint()
    asked.status, asked.body = value["status"], value["body"]
    lease = Lease(SHARD, TRIM_HORIZON, counter=3, owner="w1")
    calls: tuple[Callable[[], object], ...] = (
        lambda: asked.table.get(SHARD),
        asked.table.list_leases,
        lambda: asked.table.lease_keys_of("w1"),
        lambda: asked.table.renew(lease),
        lambda: create_lease(asked.table, lease),
    )
    try:
        calls[value["call"]]()
    except AwsError as error:
        said = str(error)
    else:
        return READ
    assert said.isprintable()
    assert len(said) < 11_000, "a thousand characters, each escaped to ten at most"
    return REFUSED


BOUNDARIES: Final = (
    Boundary("dynamodb_answer", draw, check, frozenset({READ, REFUSED}), short_inputs=20),
)
