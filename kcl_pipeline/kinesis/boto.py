"""Call Kinesis through boto3, with our own decoding of GetRecords responses.

The boto3 client makes one attempt per request (see `kcl_pipeline.aws`). GetRecords and
GetShardIterator count against the limits of a shard, so the reader handles their errors. The calls
about a whole stream are retried here. A GetRecords body is taken from botocore before its parser
runs.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

import cbor2
import urllib3
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import ClientError, HTTPClientError

from kcl_pipeline.aws_calls import (
    BODY_SECONDS,
    DEADLINES,
    aws_errors,
    limit_bodies,
    read_body,
    socket_of,
    translated,
)
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import RetrievalSettings, ShardSyncSettings
from kcl_pipeline.errors import (
    AwsError,
    ExpiredIteratorError,
    InvalidRequestError,
    SettingsError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.kinesis.client import IteratorType, LatestIterator, RecordsPage, ShardFilterType
from kcl_pipeline.kinesis.decode import CBOR_CONTENT_TYPE, MIN_BYTES, date_of, decode_page, shard_of
from kcl_pipeline.shards import USER_PARTITION_KEY, Shard, StreamId


def kinesis_errors(operation: str, about: str) -> AbstractContextManager[None]:
    """Translate errors in a block, like `aws_calls.aws_errors`.

    Args:
        operation: Name of the API operation.
        about: The stream or shard.
    """
    return aws_errors("kinesis", operation, about, _expired_iterator)


def from_client_error(error: ClientError, operation: str, about: str) -> AwsError:
    """Return the error of this package for an error response."""
    return translated(error, "kinesis", operation, about, _expired_iterator)


def _expired_iterator(error: ClientError, code: str, text: str) -> AwsError | None:
    # GetRecords returns InvalidArgument for an iterator that the service does not know any more.
    # The reader requests a new one, as for an expired one (protocol §10.3).
    operation = error.operation_name
    if code == "ExpiredIteratorException" or (
        code == "InvalidArgumentException" and operation == "GetRecords"
    ):
        return ExpiredIteratorError(text, code=code, operation=operation)
    return None


if TYPE_CHECKING:
    from mypy_boto3_kinesis import KinesisClient as BotoKinesisClient
    from mypy_boto3_kinesis.type_defs import ListShardsOutputTypeDef

_T = TypeVar("_T")

BodyFormat = Literal["json", "cbor"]

MAX_ATTEMPTS: Final = 5
RETRY_SECONDS: Final = 0.5
MAX_RETRY_SECONDS: Final = 10.0
CBOR_RECORD_BYTES: Final = 8 * 1024
"""Mean record size above which CBOR is faster also for small responses (`benchmarks.decode`)."""

CBOR_TRIALS: Final = 3
"""Number of CBOR requests in a row that the service refuses, after which JSON is requested."""

JSON_SECONDS: Final = 600.0
"""How long JSON is requested after a CBOR response could not be read, or CBOR was refused."""

LISTING_TRIALS: Final = 3
"""How often a listing is begun whose token expires."""

_BODY: Final = "KclPipelineBody"
_DISTRIBUTION: Final = "KclPipelineRecordDistribution"
_EXPIRED: Final = "ExpiredNextTokenException"
_HTTP_ERROR: Final = 300
_ARN_PARTS: Final = 6


class _CurrentRequest(threading.local):
    """The GetRecords request of this thread.

    Attributes:
        body_format: Set while the thread is inside `BotoKinesis.get_records`. None: other users of
            the same boto3 client, for which the handlers below do nothing.
    """

    body_format: BodyFormat | None = None


_REQUEST: Final = _CurrentRequest()
_DECODING: Final = threading.Lock()
"""Held while a response is decoded: two at a time evict each other's data from the CPU cache, and
need 20 to 33 percent more time.
"""


class BotoKinesis:
    """The `KinesisClient` over a boto3 client. Thread-safe. It does not close the client.

    Args:
        client: The boto3 client.
        retrieval: Settings for reading shards.
        shard_sync: Settings for ListShards.
        clock: Clock of the waits between attempts.
        rng: Randomizes the waits. None: they are not randomized.
        body_format: Format of GetRecords responses. None: by `RetrievalSettings.body_format`.
    """

    def __init__(
        self,
        client: BotoKinesisClient,
        retrieval: RetrievalSettings,
        shard_sync: ShardSyncSettings,
        clock: Clock,
        *,
        rng: random.Random | None = None,
        body_format: BodyFormat | None = None,
    ) -> None:
        self._client = client
        self._retrieval = retrieval
        self._shard_sync = shard_sync
        self._clock = clock
        self._rng = rng
        self._body_format = body_format or (
            None if retrieval.body_format == "auto" else retrieval.body_format
        )
        self._faster: dict[str, BodyFormat] = {}
        self._json_until = float("-inf")
        self._cbor_refusals = 0
        self._cbor_works = False
        receive_in_one_piece(client)
        client.meta.events.register(
            "before-call.kinesis.GetRecords", _encode_request, unique_id="kcl-pipeline-ask"
        )
        client.meta.events.register(
            "before-parse.kinesis.GetRecords", _take_body, unique_id="kcl-pipeline-take-body"
        )
        client.meta.events.register(
            "before-parse.kinesis.DescribeStreamSummary",
            _take_distribution,
            unique_id="kcl-pipeline-take-distribution",
        )

    def resolve_stream(self, name_or_arn: str, *, multi_stream: bool) -> StreamId:
        """See `KinesisClient`.

        The creation epoch has whole seconds, as in the lease keys of the Java KCL (protocol §1.3).
        """
        arn = name_or_arn if name_or_arn.startswith("arn:") else None
        # Name and ARN, as in the other calls: some servers know only one of them
        request = given(StreamName=name_or_arn.rpartition("/")[2], StreamARN=arn)
        response: Mapping[str, Any] = self._retry_transient(
            "DescribeStreamSummary",
            name_or_arn,
            lambda: self._client.describe_stream_summary(**request),
        )
        summary = response["StreamDescriptionSummary"]
        arn = arn or summary.get("StreamARN")
        created = summary.get("StreamCreationTimestamp")
        millis = None if created is None else round(created.timestamp() * 1000)
        stream = StreamId(
            summary["StreamName"],
            arn=arn,
            created_millis=millis,
            retention_hours=summary.get("RetentionPeriodHours"),
            record_distribution=response.get(_DISTRIBUTION) or USER_PARTITION_KEY,
        )
        if not multi_stream:
            return stream
        if arn is None:
            raise SettingsError(
                f"stream {name_or_arn!r} has no ARN in its description; write its ARN in `streams`"
            )
        if created is None:
            raise SettingsError(
                f"stream {name_or_arn!r} has no creation time in its description, and the lease "
                "keys of several streams need it; write one stream in `streams`"
            )
        return replace(stream, account=account_of(arn), creation_epoch=int(created.timestamp()))

    def list_shards(
        self,
        stream: StreamId,
        shard_filter: ShardFilterType | None = None,
        timestamp: datetime | None = None,
    ) -> tuple[Shard, ...]:
        """See `KinesisClient`. A listing whose token expires begins again.

        Raises:
            NotFoundError: The stream does not exist.
            ThrottledError: The service throttled all attempts (protocol §7.5).
            UnavailableError: The token of every listing expired.
        """
        first = given(
            StreamName=stream.name,
            StreamARN=stream.arn,
            ShardFilter=shard_filter and given(Type=shard_filter, Timestamp=timestamp),
        )
        for _ in range(LISTING_TRIALS):
            try:
                return self._listed(stream, first)
            except InvalidRequestError as error:
                if error.code != _EXPIRED:
                    raise
                expired = error
        raise UnavailableError(
            f"ListShards on {stream.name}: the listing took longer than its token is valid, "
            f"{LISTING_TRIALS} times in a row",
            code=_EXPIRED,
            operation="ListShards",
        ) from expired

    def _listed(self, stream: StreamId, request: Mapping[str, Any]) -> tuple[Shard, ...]:
        shards: list[Shard] = []
        while True:
            page = self._list_shards_page(stream, request)
            shards.extend(shard_of(item) for item in page["Shards"])
            if not (token := page.get("NextToken")):
                return tuple(shards)
            request = {"NextToken": token}

    def _list_shards_page(
        self, stream: StreamId, request: Mapping[str, Any]
    ) -> ListShardsOutputTypeDef:
        return self._retry_transient(
            "ListShards",
            stream.name,
            partial(self._client.list_shards, **request),
            attempts=self._shard_sync.max_list_shards_retry_attempts,
            throttle_seconds=self._shard_sync.list_shards_backoff_time_millis / 1000,
        )

    def service_time(self, stream: StreamId) -> datetime | None:
        """See `KinesisClient`: the Date header of ListShards, in whole seconds. Raises as it."""
        request = given(StreamName=stream.name, StreamARN=stream.arn, MaxResults=1)
        return date_of(self._list_shards_page(stream, request))

    def get_shard_iterator(
        self,
        stream: StreamId,
        shard_id: str,
        iterator_type: IteratorType,
        *,
        sequence_number: str | None = None,
        timestamp: datetime | None = None,
    ) -> str:
        """See `KinesisClient`. One attempt."""
        iterator, _ = self._shard_iterator(
            stream,
            shard_id,
            iterator_type,
            StartingSequenceNumber=sequence_number,
            Timestamp=timestamp,
        )
        return iterator

    def latest_iterator(self, stream: StreamId, shard_id: str) -> LatestIterator:
        """See `KinesisClient`. One attempt.

        `since` is the Date header of the response, in whole seconds, less the duration of the
        request, because the service may have determined the position at its beginning.
        """
        began = self._clock.monotonic()
        iterator, date = self._shard_iterator(stream, shard_id, "LATEST")
        took = timedelta(seconds=self._clock.monotonic() - began)
        return LatestIterator(iterator, None if date is None else date - took)

    def _shard_iterator(
        self, stream: StreamId, shard_id: str, kind: IteratorType, **more: object
    ) -> tuple[str, datetime | None]:
        """Return the iterator, and the time of the response on the clock of the service."""
        request = given(
            StreamName=stream.name,
            StreamARN=stream.arn,
            ShardId=shard_id,
            ShardIteratorType=kind,
            **more,
        )
        with kinesis_errors("GetShardIterator", f"{shard_id} of {stream.name}"):
            response = self._client.get_shard_iterator(**request)
        iterator = response.get("ShardIterator")
        if not iterator:
            raise UnavailableError(
                f"GetShardIterator returned no iterator for {shard_id} of {stream.name}",
                code="NoIterator",
                operation="GetShardIterator",
            )
        return iterator, date_of(response)

    def get_records(
        self, stream: StreamId, shard_id: str, iterator: str, limit: int
    ) -> RecordsPage:
        """See `KinesisClient`. An unreadable body raises `UnavailableError`.

        One attempt. A response in CBOR that cannot be read is requested once more in JSON: some
        servers write the data in base64 there. The iterator stays valid.
        """
        body_format = self._format_for(stream)
        try:
            body, content_type, served = self._get_body(
                stream, shard_id, iterator, limit, body_format
            )
        except (UnavailableError, InvalidRequestError) as error:
            if body_format == "cbor":
                self._note_refusal(error)
            raise
        try:
            page = _decoded(body, content_type, stream, shard_id)
        except UnavailableError:
            if body_format != "cbor":
                raise
            self._json_until = self._clock.monotonic() + JSON_SECONDS
            body_format = "json"
            body, content_type, served = self._get_body(stream, shard_id, iterator, limit, "json")
            page = _decoded(body, content_type, stream, shard_id)
        if page.records.num_rows:
            if body_format == "cbor":
                self._cbor_refusals, self._cbor_works = 0, True
            large = (
                page.bytes >= MIN_BYTES or page.bytes > CBOR_RECORD_BYTES * page.records.num_rows
            )
            self._faster[stream.serialized] = "cbor" if large else "json"
        return replace(page, served_millis=served)

    def _note_refusal(self, error: AwsError) -> None:
        # A network failure does not show whether the server supports CBOR, nor does an internal
        # error of a server whose CBOR was read before.
        is_response = isinstance(error.__cause__, ClientError)
        if is_response and (isinstance(error, InvalidRequestError) or not self._cbor_works):
            self._cbor_refusals += 1
            if self._cbor_refusals >= CBOR_TRIALS:
                self._json_until = self._clock.monotonic() + JSON_SECONDS
                self._cbor_refusals = 0

    def _get_body(
        self, stream: StreamId, shard_id: str, iterator: str, limit: int, body_format: BodyFormat
    ) -> tuple[bytes, str, int]:
        """Return the body of a GetRecords response, its content type and its time.

        The time is on the clock of the service: the Date header, less the duration of the request.
        It is on the clock of this host if there is no such header.
        """
        began, wall = self._clock.monotonic(), self._clock.wall()
        request: dict[str, Any] = {"ShardIterator": iterator, "Limit": limit}
        if stream.arn is not None:
            request["StreamARN"] = stream.arn
        _REQUEST.body_format = body_format
        try:
            with kinesis_errors("GetRecords", f"{shard_id} of {stream.name}"):
                response: Mapping[str, Any] = self._client.get_records(**request)
        finally:
            _REQUEST.body_format = None
        body, content_type = response[_BODY]  # `_take_body` has put it there
        date = date_of(response)
        seconds = wall if date is None else date.timestamp() - (self._clock.monotonic() - began)
        return body, content_type, int(seconds * 1000)

    def _format_for(self, stream: StreamId) -> BodyFormat:
        if self._clock.monotonic() < self._json_until:
            return "json"
        return self._body_format or self._faster.get(stream.serialized, "json")

    def _retry_transient(
        self,
        operation: str,
        about: str,
        call: Callable[[], _T],
        *,
        attempts: int = MAX_ATTEMPTS,
        throttle_seconds: float | None = None,
    ) -> _T:
        """Call until it succeeds. After the last attempt its error is raised.

        Args:
            operation: Name of the API operation.
            about: The stream, for the message.
            call: Makes the request.
            attempts: Number of attempts when throttled. For other errors `MAX_ATTEMPTS` at most.
            throttle_seconds: Wait after throttling. None: a growing wait.
        """
        failures = 0
        while True:
            try:
                with kinesis_errors(operation, about):
                    return call()
            except (ThrottledError, UnavailableError) as error:
                failures += 1
                if failures >= (
                    attempts if isinstance(error, ThrottledError) else min(attempts, MAX_ATTEMPTS)
                ):
                    raise
                growing = min(RETRY_SECONDS * 2 ** (failures - 1), MAX_RETRY_SECONDS)
                wait = (
                    throttle_seconds
                    if throttle_seconds is not None and isinstance(error, ThrottledError)
                    else growing
                )
                self._clock.sleep(wait * (self._rng.uniform(0.5, 1.0) if self._rng else 1.0))


def receive_in_one_piece(client: BotoKinesisClient) -> None:
    """Make a boto3 client read GetRecords bodies by one call, instead of in pieces of 64 KiB.

    This saves an eighth of the CPU time of a full page. botocore has no public hook between sending
    and joining the pieces, so this replaces a private method. If botocore has no such method, the
    client is not changed.
    """
    endpoint = getattr(client, "_endpoint", None)
    if getattr(getattr(endpoint, "_send", None), "reads_in_one_piece", False):
        return
    limit_bodies(client)
    send = getattr(endpoint, "_send", None)
    if endpoint is None or send is None:
        return

    def send_and_read(request: AWSPreparedRequest) -> AWSResponse:
        if _REQUEST.body_format is None:
            return cast("AWSResponse", send(request))
        request.stream_output = True
        response: Any = send(request)
        try:
            with DEADLINES.limited(socket_of(response.raw), BODY_SECONDS):
                # the attribute in which `content` stores the joined pieces
                response._content = read_body(response.raw)  # noqa: SLF001
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise HTTPClientError(error=error) from error
        return cast("AWSResponse", response)

    send_and_read.reads_in_one_piece = True  # type: ignore[attr-defined] # (checked above)
    endpoint._send = send_and_read  # noqa: SLF001 (see above)


def _decoded(body: bytes, content_type: str, stream: StreamId, shard_id: str) -> RecordsPage:
    with _DECODING:
        return decode_page(body, content_type, stream.column, shard_id)


def account_of(arn: str) -> str:
    """Return the account id of a stream's ARN. Raise `SettingsError` for another string."""
    parts = arn.split(":", _ARN_PARTS - 1)
    if (
        len(parts) != _ARN_PARTS
        or parts[2] != "kinesis"
        or not parts[4].isdigit()
        or not parts[5].startswith("stream/")
    ):
        raise SettingsError(
            f"{arn!r} is not the ARN of a stream; "
            "write arn:aws:kinesis:<region>:<account>:stream/<name>"
        )
    return parts[4]


def given(**fields: Any) -> dict[str, Any]:
    """Return the fields of a request that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _encode_request(params: dict[str, Any], **_: object) -> None:
    """Turn the request into CBOR if CBOR is to be used. Called before the request is signed."""
    if _REQUEST.body_format == "cbor":
        params["headers"]["Content-Type"] = CBOR_CONTENT_TYPE
        params["body"] = cbor2.dumps(json.loads(params["body"]))


def _take_body(
    response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object
) -> None:
    """Take the body of a successful response, and leave an empty one for botocore's parser.

    An error response in CBOR becomes JSON, which botocore can parse.
    """
    if _REQUEST.body_format is None:
        return
    content_type = str(response_dict["headers"].get("content-type", ""))
    if response_dict["status_code"] < _HTTP_ERROR:
        customized_response_dict[_BODY] = (response_dict["body"], content_type)
        response_dict["body"] = b"{}"
    elif "cbor" in content_type.lower():
        try:
            response_dict["body"] = json.dumps(
                cbor2.loads(response_dict["body"]), default=str
            ).encode()
        except (cbor2.CBORDecodeError, ValueError, TypeError):
            response_dict["body"] = b"{}"


def _take_distribution(
    response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object
) -> None:
    """Keep the record distribution strategy, which versions of botocore before 2026 drop."""
    try:
        summary = json.loads(response_dict["body"])["StreamDescriptionSummary"]
        customized_response_dict[_DISTRIBUTION] = summary.get("RecordDistributionStrategy")
    except (ValueError, LookupError, TypeError, AttributeError):
        return  # an error response, or one that botocore's parser reports
