"""Embedded AWS: one server on 127.0.0.1 that SDKs find through `AWS_ENDPOINT_URL`.

Kinesis is the model of `kcl_pipeline.testing`. DynamoDB, S3, STS and CloudWatch are moto behind one
lock. The server rejects calls to other services and requests of web pages (`gate`). All data is in
memory. An access key of 12 digits is the number of its account (`accounts`).

Control paths:

- `/_local/health` (any method).
- `/_local/faults` (GET, POST a list of `FaultRule`, DELETE).
- `/_local/clock` (GET, POST `{"advance_seconds": …}`). It affects Kinesis only.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import parse_qs

import msgspec
from pydantic import TypeAdapter, ValidationError

from kcl_pipeline.arguments import check_flag, check_number, check_text, checked_arguments
from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import KclError
from kcl_pipeline.extras import require
from kcl_pipeline.local.accounts import KinesisAccounts, account_of
from kcl_pipeline.local.dynamodb_legacy import modernize
from kcl_pipeline.local.faults import Fault, FaultHook, FaultRule, FaultRules, refusal
from kcl_pipeline.local.http.gate import refused
from kcl_pipeline.local.http.http1 import HttpServer
from kcl_pipeline.local.http.messages import Request, Response
from kcl_pipeline.local.moto_http import SERVICES, MotoServices
from kcl_pipeline.local.no_proxy import no_proxy_variables
from kcl_pipeline.testing.clock import ShiftedClock
from kcl_pipeline.testing.kinesis.errors import KinesisError
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.kinesis.state import KinesisSettings

_PRIVATE: Final = "/_local/"
_KINESIS_TARGET: Final = "Kinesis_20131202"
_RULES: Final = TypeAdapter(list[FaultRule])
_SCOPE: Final = re.compile(r"Credential=[^/,]+/\d{8}/[^/,]+/([^/,]+)/")
_RPC_PATH: Final = re.compile(r"/service/[^/]+/operation/(\w+)")
_TARGETS: Final = {_KINESIS_TARGET: "kinesis", "DynamoDB_20120810": "dynamodb"}


def classify(request: Request) -> tuple[str, str]:
    """Return the service and the operation of a request.

    The operation of an S3 call is its HTTP method.
    """
    target, _, operation = request.headers.get("x-amz-target", "").partition(".")
    if target in _TARGETS:
        return _TARGETS[target], operation
    scope = _SCOPE.search(request.headers.get("authorization", ""))
    service = scope.group(1) if scope else "s3"
    if operation:
        return service, operation
    if (rpc := _RPC_PATH.fullmatch(request.path)) is not None:
        return service, rpc.group(1)
    if request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        return service, parse_qs(request.body.decode("latin-1")).get("Action", [request.method])[0]
    return service, request.method


def _unknown_service(service: str) -> Fault:
    message = f"the embedded AWS has no service {service[:50]!r}; it has kinesis, dynamodb, s3, sts"
    return Fault("deny", "UnknownServiceException", f"{message} and monitoring")


# Not an internal error: an SDK would repeat the call.
_TOO_DEEP: Final = Fault("throttle", "SerializationException", "the request is nested too deeply")

_MAX_PORT: Final = 65_535


@checked_arguments
class EmbeddedAws:
    """Kinesis, DynamoDB, S3, STS and CloudWatch on 127.0.0.1 for tests, demos and development.

    The class is a context manager.

    Args:
        port: Port to listen on; 0 selects a free port.
        enforce_limits: Whether shards throttle as in Kinesis. Ignored when `settings` is given.
        clock: Clock of the Kinesis model. None: a `ShiftedClock`, which can be advanced.
        region: AWS region. Ignored when `settings` is given.
        faults: Function that selects the fault of every call. `fault_rules` apply only to calls
            for which it returns None.
        settings: Settings of the Kinesis model.

    Attributes:
        fault_rules: Rules that clients post to `/_local/faults`.

    Raises:
        SettingsError: An argument is wrong, or the extra `local` is not installed.

    Example:
        >>> from kcl_pipeline import EmbeddedAws
        >>> with EmbeddedAws() as aws:  # doctest: +SKIP
        ...     os.environ.update(aws.environment())
    """

    def __init__(
        self,
        port: int = 0,
        enforce_limits: bool = False,
        clock: Clock | None = None,
        region: str = "us-east-1",
        faults: FaultHook | None = None,
        settings: KinesisSettings | None = None,
    ) -> None:
        check_number("EmbeddedAws port", port, "a port", most=_MAX_PORT, whole=True)
        check_flag("EmbeddedAws enforce_limits", enforce_limits)
        check_text("EmbeddedAws region", region, "Write a region, such as 'us-east-1'")
        require("local", "the embedded AWS")
        self.clock: Clock = clock if clock is not None else ShiftedClock()
        self.region = region if settings is None else settings.region
        self.fault_rules = FaultRules()
        self._port = port
        self._faults = faults
        self._moto = MotoServices()
        kinesis_settings = (
            settings
            if settings is not None
            else KinesisSettings(region=region, enforce_limits=enforce_limits)
        )
        self._account = kinesis_settings.account
        self._kinesis = KinesisAccounts(self.clock, kinesis_settings)
        self._server: HttpServer | None = None

    # -- start and stop
    # ----------------------------------------------------------------------------

    def start(self) -> Self:
        """Start to listen.

        Raises:
            OSError: Another process uses the port.
        """
        if self._server is None:
            server = HttpServer(self._handle, self._port)
            self._moto.start()
            self._kinesis.start()
            server.start()
            self._server = server
        return self

    def stop(self) -> None:
        """Stop the server and delete all data except the Kinesis model.

        Callers can still read `kinesis` afterwards.
        """
        server, self._server = self._server, None
        if server is not None:
            self._kinesis.stop()
            server.stop()
            self._moto.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def warm_up(self) -> None:
        """Import moto now instead of at the first DynamoDB call; this takes half a second."""
        self._moto.load()

    # -- access for clients
    # ----------------------------------------------------------------------------

    @property
    def endpoint_url(self) -> str:
        """The address `http://127.0.0.1:<port>`.

        Raises:
            RuntimeError: The server is not started.
        """
        if self._server is None:
            raise RuntimeError("the embedded AWS is not started")
        return f"http://127.0.0.1:{self._server.port}"

    @property
    def kinesis(self) -> KinesisModel:
        """The Kinesis model of the default account, for use without HTTP."""
        return self._kinesis.default.model

    def environment(self, account: str | None = None) -> dict[str, str]:
        """Return environment variables that direct AWS SDKs and delta-rs to this server.

        They contain dummy credentials. If this process has a proxy, they exclude this host from
        it.

        Args:
            account: The access key is this account number of 12 digits, so that requests are for
                this account. None: the default account.
        """
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": account or "local",
            "AWS_SECRET_ACCESS_KEY": "local",
            "AWS_DEFAULT_REGION": self.region,
            "AWS_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ALLOW_HTTP": "true",
            **no_proxy_variables(os.environ),
        }

    # -- requests
    # ----------------------------------------------------------------------------

    def _handle(self, request: Request) -> Response | None:
        if (response := refused(request)) is not None:
            return response
        if request.path.startswith(_PRIVATE):
            return self._private(request)
        service, operation = classify(request)
        try:
            return self._serve(service, operation, request)
        except RecursionError:
            return refusal(_TOO_DEEP, service, operation, request)

    def _serve(self, service: str, operation: str, request: Request) -> Response | None:
        if service != "kinesis" and service not in SERVICES:
            return refusal(_unknown_service(service), service, operation, request)
        fault = self._fault(service, operation, request.body)
        if fault is not None and fault.delay_seconds:
            self.clock.sleep(fault.delay_seconds)
        if fault is not None and fault.kind == "delay":
            fault = None
        if fault is not None and fault.kind == "drop_before":
            return None
        if fault is not None and fault.kind != "drop_after":
            return self._refuse(fault, service, operation, request)
        if service == "dynamodb":
            request = replace(request, body=modernize(operation, request.body))
        if service == "kinesis":
            response = self._kinesis.handler(request).handle(operation, request)
        else:
            account = account_of(request)
            is_default = account is None or account == self._account
            response = self._moto.handle(service, request, None if is_default else account)
        return response if fault is None else None

    def _fault(self, service: str, operation: str, body: bytes) -> Fault | None:
        fault = self._faults(service, operation, body) if self._faults is not None else None
        return fault if fault is not None else self.fault_rules(service, operation, body)

    def _refuse(self, fault: Fault, service: str, operation: str, request: Request) -> Response:
        response = refusal(fault, service, operation, request)
        if service != "kinesis":
            return response
        answer = msgspec.json.decode(response.body)
        return self._kinesis.default.refuse(
            request, KinesisError(answer["__type"], answer["message"])
        )

    def _private(self, request: Request) -> Response:
        try:
            answer = self._control(
                request.method, request.path.removeprefix(_PRIVATE), request.body
            )
        except (ValidationError, msgspec.DecodeError, ValueError, LookupError, KclError) as error:
            return Response(
                400,
                msgspec.json.encode({"error": str(error)}),
                {"Content-Type": "application/json"},
            )
        if answer is None:
            return Response(404, b"{}", {"Content-Type": "application/json"})
        return Response(200, msgspec.json.encode(answer), {"Content-Type": "application/json"})

    def _control(self, method: str, name: str, body: bytes) -> Any:
        if name == "health":
            return {"status": "ok"}
        if name == "faults":
            if method == "POST":
                self.fault_rules.replace(_RULES.validate_json(body))
            elif method == "DELETE":
                self.fault_rules.replace([])
            return [rule.model_dump() for rule in self.fault_rules.rules]
        if name == "clock" and isinstance(self.clock, ShiftedClock):
            if method == "POST":
                self.clock.advance(float(msgspec.json.decode(body)["advance_seconds"]))
            return {"offset_seconds": self.clock.offset_seconds}
        return None
