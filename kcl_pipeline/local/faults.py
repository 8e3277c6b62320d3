"""Injected faults of the embedded AWS.

A fault throttles a call, denies it, fails it with a server error, delays it, or drops its
connection before or after the call is applied.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args
from xml.sax.saxutils import escape

import msgspec
from pydantic import ConfigDict, Field

from kcl_pipeline.arguments import check_number, check_text, checked_arguments
from kcl_pipeline.checked_fields import CheckedFields
from kcl_pipeline.local.http.messages import Request, Response
from kcl_pipeline.settings_errors import wrong

Kind = Literal["throttle", "error500", "deny", "drop_before", "drop_after", "delay"]
_KINDS: Final = get_args(Kind)
_KINESIS_DATA: Final = frozenset({"GetRecords", "GetShardIterator", "PutRecord", "PutRecords"})
_XML: Final = frozenset({"s3", "sts", "monitoring", "iam", "ec2", "sns"})


@checked_arguments
@dataclass(frozen=True, slots=True)
class Fault:
    """The fault that is injected into one call.

    Attributes:
        kind: `throttle`, `error500` and `deny` reject the call, and nothing is applied.
            `drop_before` closes the connection, and nothing is applied. `drop_after` applies the
            call and closes the connection without a response. `delay` only delays the call.
        code: Error code. Empty: the code that the service uses.
        message: Error message. Empty: a default message.
        delay_seconds: Time that passes before the call is processed or rejected.

    Raises:
        SettingsError: A value is wrong.

    Example:
        >>> from kcl_pipeline import Fault
        >>> Fault("delay", delay_seconds=2.0).delay_seconds
        2.0
    """

    kind: Kind
    code: str = ""
    message: str = ""
    delay_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            advice = f"Write one of {', '.join(_KINDS)}"
            raise wrong("Fault kind", self.kind, "is not a kind", advice)
        for name in ("code", "message"):
            if getattr(self, name) != "":
                check_text(f"Fault {name}", getattr(self, name), "Write a text")
        check_number("Fault delay_seconds", self.delay_seconds, "a time in seconds")


FaultHook = Callable[[str, str, bytes], Fault | None]
"""Function that selects the fault of a call; None means no fault.

It is called before every call with three arguments. They are the service (`kinesis`, `dynamodb`,
`s3`, …), the operation (for S3 the HTTP method) and the request body.
"""


class FaultRule(CheckedFields):
    """One rule of the list that clients post to `/_local/faults`.

    Attributes:
        service: Service that the rule applies to; `*` matches every service.
        operation: Operation that the rule applies to; `*` matches every operation.
        kind: Kind of the fault.
        probability: Probability that a matching call gets the fault, from 0 to 1.
        count: How many more calls get the fault. None: no limit.
        contains: The rule matches only bodies that contain this text. None: all bodies.
        code: Error code that replaces the service's own.
        message: Error message that replaces the default.
        delay_seconds: Delay of a rule of kind `delay`. It is added to the fault of another rule.
        applied: How many calls got the fault so far.

    Example:
        >>> from kcl_pipeline import FaultRule
        >>> rule = FaultRule(service="dynamodb", operation="UpdateItem", kind="throttle", count=3)
        >>> rule.count
        3
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
    delay_seconds: float = Field(default=0.0, ge=0.0)
    applied: int = 0


class FaultRules:
    """Ordered list of rules, usable as a `FaultHook`.

    The first rule that matches a call and passes its random draw determines the fault. The delays
    of matching rules before it are added. The random generator is seeded. The class is thread-safe.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._guard = threading.Lock()
        self._rules: list[FaultRule] = []

    def __call__(self, service: str, operation: str, body: bytes) -> Fault | None:
        """Return the fault of a call, or None (see `FaultHook`)."""
        if not self._rules:
            return None
        delay_seconds = 0.0
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
                    if rule.kind != "delay":
                        return Fault(rule.kind, rule.code, rule.message, delay_seconds)
                    delay_seconds += rule.delay_seconds
        return Fault("delay", delay_seconds=delay_seconds) if delay_seconds else None

    def replace(self, rules: list[FaultRule]) -> None:
        """Replace all rules."""
        with self._guard:
            self._rules = [rule.model_copy() for rule in rules]

    @property
    def rules(self) -> list[FaultRule]:
        """Copies of the rules with the current values of `count` and `applied`."""
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
    """Return the error response of a fault in the format of the service's SDK."""
    code = fault.code or _code(service, operation, fault.kind)
    message = fault.message or _message(service, operation, fault.kind)
    content_type = request.headers.get("content-type", "")
    # Some services take both: newer SDKs speak JSON with them
    if service in _XML and not content_type.startswith("application/x-amz-json"):
        status = {"error500": 500, "deny": 403}.get(fault.kind, 503)
        error = f"<Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error>"
        body = error if service == "s3" else f"<ErrorResponse>{error}</ErrorResponse>"
        return Response(
            status,
            f'<?xml version="1.0" encoding="UTF-8"?>{body}'.encode(),
            {"Content-Type": "application/xml"},
        )
    status = 500 if fault.kind == "error500" else 400
    kind = f"com.amazonaws.dynamodb.v20120810#{code}" if service == "dynamodb" else code
    return Response(
        status,
        msgspec.json.encode({"__type": kind, "message": message}),
        {"Content-Type": content_type or "application/x-amz-json-1.0", "x-amzn-ErrorType": code},
    )
