"""HTTP request handler of the Kinesis model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from email.utils import formatdate
from typing import Final

from kcl_pipeline.clock import SystemClock
from kcl_pipeline.local.http.messages import Request, Response
from kcl_pipeline.local.kinesis import codec, event_stream
from kcl_pipeline.testing.kinesis import data as data_plane
from kcl_pipeline.testing.kinesis import subscriptions
from kcl_pipeline.testing.kinesis.errors import KinesisError
from kcl_pipeline.testing.kinesis.model import KinesisModel, render_put
from kcl_pipeline.testing.kinesis.stream import Subscription

_POLL_SECONDS: Final = 0.02
_SERVER_ERRORS: Final = frozenset({"InternalFailure", "ServiceUnavailable"})


class KinesisHandler:
    """Handle Kinesis requests of any SDK with a model."""

    def __init__(self, model: KinesisModel) -> None:
        self.model = model
        self._numbers = itertools.count(1)
        self._stop = SystemClock().signal()

    def start(self) -> None:
        """Permit subscriptions to wait for new records."""
        self._stop = SystemClock().signal()

    def stop(self) -> None:
        """End all subscriptions."""
        self._stop.set()

    def handle(self, operation: str, request: Request) -> Response:
        """Return the response to one request, in the encoding of the request."""
        content_type = content_type_of(request)
        try:
            if operation == "SubscribeToShard":
                return self._subscribe(content_type, request.body)
            body = self._answer(operation, content_type, request.body)
        except KinesisError as error:
            return self.refuse(request, error)
        except KeyError as error:
            return self.refuse(request, KinesisError("ValidationException", f"{error} is missing"))
        except (AttributeError, TypeError, ValueError) as error:
            # The model trusts the types of parameters, and each SDK checks them before it sends.
            return self.refuse(request, KinesisError("SerializationException", str(error)))
        return Response(200, body, self._headers(content_type))

    def refuse(self, request: Request, error: KinesisError) -> Response:
        """Return an error response, which SDKs convert to their exception."""
        content_type = content_type_of(request)
        status = 500 if error.code in _SERVER_ERRORS else 400
        body = codec.encode(content_type, {"__type": error.code, "message": error.message})
        return Response(
            status, body, self._headers(content_type) | {"x-amzn-ErrorType": error.code}
        )

    def _headers(self, content_type: str) -> dict[str, str]:
        return {
            "Content-Type": content_type,
            "Date": formatdate(self.model.world.now_millis() / 1000, usegmt=True),
            "x-amzn-RequestId": f"00000000-0000-4000-8000-{next(self._numbers):012x}",
        }

    def _answer(self, operation: str, content_type: str, body: bytes) -> bytes:
        world = self.model.world
        if operation == "PutRecords":
            params, records = codec.decode_put_records(content_type, body)
            puts = data_plane.put_records(world, params, codec.checked_entries(records))
            failed = sum(p.error is not None for p in puts)
            answer = {
                "FailedRecordCount": failed,
                "Records": [render_put(p) for p in puts],
                "EncryptionType": "NONE",
            }
            return codec.encode(content_type, answer)
        params = (
            codec.decode(content_type, body or b"{}") if body or content_type == codec.JSON else {}
        )
        if operation == "GetRecords":
            return codec.encode_read(content_type, data_plane.get_records(world, params))
        answer = self.model.call(operation, **params)
        return codec.encode(content_type, answer) if answer else b""

    # -- enhanced fan-out
    # ----------------------------------------------------------------------------

    def _subscribe(self, content_type: str, body: bytes) -> Response:
        params = codec.decode(content_type, body)
        subscription = subscriptions.subscribe(self.model.world, params)
        headers = self._headers(content_type) | {"Content-Type": event_stream.CONTENT_TYPE}
        return Response(200, headers=headers, stream=self._events(content_type, subscription))

    def _events(self, content_type: str, subscription: Subscription) -> Iterator[bytes]:
        world, stop = self.model.world, self._stop
        yield event_stream.event("initial-response", content_type, codec.encode(content_type, {}))
        while not subscriptions.has_ended(world, subscription):
            try:
                event = subscriptions.next_event(world, subscription)
            except KinesisError as error:
                yield event_stream.exception(
                    error.code, content_type, codec.encode(content_type, {"message": error.message})
                )
                return
            if event is not None:
                yield event_stream.event(
                    "SubscribeToShardEvent", content_type, codec.encode_event(content_type, event)
                )
                if event.continuation is None:
                    return
            elif stop.wait(_POLL_SECONDS):
                return


def content_type_of(request: Request) -> str:
    """Return the content type of a request, which its response also uses."""
    return (
        codec.CBOR
        if request.headers.get("content-type", "").partition(";")[0].strip() == codec.CBOR
        else codec.JSON
    )
