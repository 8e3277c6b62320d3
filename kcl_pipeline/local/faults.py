"""Faults to order: throttled calls, denied actions, server errors, and calls that are applied but
never answered.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal
from xml.sax.saxutils import escape

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from kcl_pipeline.local.messages import Request, Response

Kind = Literal["throttle", "error500", "deny", "drop_before", "drop_after"]
_KINESIS_DATA: Final = frozenset({"GetRecords", "GetShardIterator", "PutRecord", "PutRecords"})
_XML: Final = frozenset({"s3", "sts", "monitoring", "iam", "ec2", "sns"})


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one call.

    `throttle`, `error500`, `deny`: refused, nothing applied. `drop_before`: the connection ends,
    nothing applied. `drop_after`: applied, then the connection ends without an answer, which the
    client sees as a time-out. `code` and `message` replace the service's own words.
    """

    kind: Kind
    code: str = ""
    message: str = ""


FaultHook = Callable[[str, str, bytes], Fault | None]
"""Asked before every call with service (`kinesis`, `dynamodb`, `s3`, …), operation (an S3 call's is
its HTTP method) and body; None: no fault.
"""


class FaultRule(BaseModel):
    """A rule as posted to `/_local/faults`. `*` matches every service or operation; `count` None:
    for ever; `contains`: only bodies with this text.
    """

    model_config = ConfigDict(extra="forbid")

    service: str = "*"
    operation: str = "*"
    kind: Kind
    probability: float = Field(default=1.0, ge=0.0, le=1.0)
    count: int | None = Field(default=None, ge=0)
    contains: str | None = None
    code: str = ""
    message: str = ""
    applied: int = 0


class FaultRules:
    """Rules that are tried in order; the first that matches and whose dice fall so is used.

    Thread-safe; the dice are seeded.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._guard = threading.Lock()
        self._rules: list[FaultRule] = []

    def __call__(self, service: str, operation: str, body: bytes) -> Fault | None:
        """A `FaultHook`."""
        if not self._rules:
            return None
        with self._guard:
            for rule in self._rules:
                if (
                    rule.service not in ("*", service)
                    or rule.operation not in ("*", operation)
                    or rule.count == 0
                ):
                    continue
                if rule.contains is not None and rule.contains.encode() not in body:
                    continue
                if self._random.random() < rule.probability:
                    rule.count = None if rule.count is None else rule.count - 1
                    rule.applied += 1
                    return Fault(rule.kind, rule.code, rule.message)
        return None

    def replace(self, rules: list[FaultRule]) -> None:
        """Use these rules from now on."""
        with self._guard:
            self._rules = [rule.model_copy() for rule in rules]

    @property
    def rules(self) -> list[FaultRule]:
        """The rules as they stand: `count` left, `applied` so far."""
        with self._guard:
            return [rule.model_copy() for rule in self._rules]


def _code(service: str, operation: str, kind: Kind) -> str:
    if kind == "deny":
        return "AccessDenied" if service in _XML else "AccessDeniedException"
    if kind == "error500":
        return {"dynamodb": "InternalServerError", "s3": "InternalError"}.get(
            service, "InternalFailure"
        )
    if service == "s3":
        return "SlowDown"
    if service == "dynamodb" or operation in _KINESIS_DATA:
        return "ProvisionedThroughputExceededException"
    return "LimitExceededException" if service == "kinesis" else "ThrottlingException"


def _message(service: str, operation: str, kind: Kind) -> str:
    if kind == "deny":
        return (
            "User: arn:aws:iam::123456789012:user/local is not authorized to perform: "
            f"{service}:{operation}"
        )
    return "Rate exceeded." if kind == "throttle" else "The service failed."


def refusal(fault: Fault, service: str, operation: str, request: Request) -> Response:
    """The answer to a call that a fault refuses, in the form that the service's SDK reads."""
    code = fault.code or _code(service, operation, fault.kind)
    message = fault.message or _message(service, operation, fault.kind)
    if service in _XML:
        status = {"error500": 500, "deny": 403}.get(fault.kind, 503)
        error = f"<Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error>"
        body = error if service == "s3" else f"<ErrorResponse>{error}</ErrorResponse>"
        return Response(
            status,
            f'<?xml version="1.0" encoding="UTF-8"?>{body}'.encode(),
            {"Content-Type": "application/xml"},
        )
    status = 500 if fault.kind == "error500" else 400
    content_type = request.headers.get("content-type", "application/x-amz-json-1.0")
    kind = f"com.amazonaws.dynamodb.v20120810#{code}" if service == "dynamodb" else code
    return Response(
        status,
        msgspec.json.encode({"__type": kind, "message": message}),
        {"Content-Type": content_type, "x-amzn-ErrorType": code},
    )
