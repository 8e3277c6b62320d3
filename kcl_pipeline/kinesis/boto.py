"""Kinesis by boto3: signed and carried by botocore, but GetRecords bodies are taken before
botocore's parser sees them.

Every request is tried once by the client (its configuration says so, see `kcl_pipeline.aws`).
GetRecords and GetShardIterator count against the limits of a shard, so their failures go straight
to the reader; the few calls about a whole stream are repeated here.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

import cbor2
import urllib3
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import HTTPClientError

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import RetrievalSettings, ShardSyncSettings
from kcl_pipeline.deadline import BODY_SECONDS, DEADLINES, limit_bodies, socket_of
from kcl_pipeline.errors import InvalidRequestError, SettingsError, ThrottledError, UnavailableError
from kcl_pipeline.kinesis.aws_errors import kinesis_errors
from kcl_pipeline.kinesis.client import IteratorType, LatestIterator, RecordsPage, ShardFilterType
from kcl_pipeline.kinesis.decode.bodies import CBOR_CONTENT_TYPE, decode_page
from kcl_pipeline.kinesis.decode.json_columns import MIN_BYTES
from kcl_pipeline.shards import HashKeyRange, Shard, StreamId

if TYPE_CHECKING:
    from mypy_boto3_kinesis import KinesisClient as BotoKinesisClient

_T = TypeVar("_T")

BodyFormat = Literal["json", "cbor"]

MAX_ATTEMPTS: Final = 5
RETRY_SECONDS: Final = 0.5
MAX_RETRY_SECONDS: Final = 10.0
CBOR_RECORD_BYTES: Final = 8 * 1024
"""Mean size of a record above which CBOR is the faster form also of small answers
(`benchmarks.decode`).
"""

CBOR_TRIALS: Final = 3
"""So many times CBOR is asked for while it was never answered; then the service, or what stands in
for it, is taken not to speak it.
"""

_BODY: Final = "KclPipelineBody"
_HTTP_ERROR: Final = 300
_ARN_PARTS: Final = 6


class _Ours(threading.local):
    """Set while this thread is inside `BotoKinesis.get_records`, so that other users of the same
    client get what botocore gives.
    """

    body_format: BodyFormat | None = None


_OURS: Final = _Ours()
_DECODING: Final = threading.Lock()
"""One answer at a time: threads that take turns in the middle of one push each other's data out of
the processor's cache, for a fifth to a third more time.
"""


class BotoKinesis:
    """The `KinesisClient` over a boto3 client; may be used by many threads. The client is not
    closed here.

    `body_format`: in which form GetRecords is asked for, instead of what
    `RetrievalSettings.body_format` says.
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
        self._cbor_works = False
        self._cbor_failures = 0
        receive_in_one_piece(client)
        client.meta.events.register(
            "before-call.kinesis.GetRecords", _ask, unique_id="kcl-pipeline-ask"
        )
        client.meta.events.register(
            "before-parse.kinesis.GetRecords", _take_body, unique_id="kcl-pipeline-take-body"
        )

    def resolve_stream(self, name_or_arn: str, *, multi_stream: bool) -> StreamId:
        """See `KinesisClient`.

        The creation epoch is in whole seconds, as in lease keys of the Java library (protocol
        §1.3).
        """
        arn = name_or_arn if name_or_arn.startswith("arn:") else None
        where: dict[str, Any] = {"StreamARN": arn} if arn else {"StreamName": name_or_arn}
        answer = self._retry_transient(
            "DescribeStreamSummary",
            name_or_arn,
            lambda: self._client.describe_stream_summary(**where),
        )
        summary = answer["StreamDescriptionSummary"]
        name = summary["StreamName"]
        arn = arn or summary.get("StreamARN")
        created = summary.get("StreamCreationTimestamp")
        millis = None if created is None else round(created.timestamp() * 1000)
        if not multi_stream:
            return StreamId(name, arn=arn, created_millis=millis)
        if arn is None:
            raise SettingsError(
                f"stream {name_or_arn!r} has no ARN in its description; write its ARN in `streams`"
            )
        if created is None:
            raise SettingsError(
                f"stream {name_or_arn!r} has no creation time in its description, which lease keys "
                "of several streams need; write one stream in `streams`"
            )
        return StreamId(name, account_of(arn), int(created.timestamp()), arn, millis)

    def list_shards(
        self,
        stream: StreamId,
        shard_filter: ShardFilterType | None = None,
        timestamp: datetime | None = None,
    ) -> tuple[Shard, ...]:
        """See `KinesisClient`.

        Raises `NotFound`, and `ThrottledError` when the service still refuses after all attempts
        (protocol §7.5).
        """
        request: dict[str, Any] = _name(stream)
        if shard_filter is not None:
            request["ShardFilter"] = {"Type": shard_filter} | (
                {"Timestamp": timestamp} if timestamp is not None else {}
            )
        shards: list[Shard] = []
        while True:
            page = self._retry_transient(
                "ListShards",
                stream.name,
                lambda request=request: self._client.list_shards(**request),  # type: ignore[misc] # (bound now, called at once)
                attempts=self._shard_sync.max_list_shards_retry_attempts,
                throttle_seconds=self._shard_sync.list_shards_backoff_time_millis / 1000,
            )
            shards.extend(_shard(item) for item in page["Shards"])
            token = page.get("NextToken")
            if not token:
                return tuple(shards)
            request = {"NextToken": token}

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
        more: dict[str, Any] = {}
        if sequence_number is not None:
            more["StartingSequenceNumber"] = sequence_number
        if timestamp is not None:
            more["Timestamp"] = timestamp
        iterator, _ = self._shard_iterator(stream, shard_id, iterator_type, more)
        return iterator

    def latest_iterator(self, stream: StreamId, shard_id: str) -> LatestIterator:
        """See `KinesisClient`. One attempt.

        The time is that of the answer's Date header, which is in whole seconds, less what the
        request took: the service may have found the place as soon as it was asked.
        """
        began = self._clock.monotonic()
        iterator, date = self._shard_iterator(stream, shard_id, "LATEST", {})
        took = timedelta(seconds=self._clock.monotonic() - began)
        return LatestIterator(iterator, None if date is None else date - took)

    def _shard_iterator(
        self, stream: StreamId, shard_id: str, kind: IteratorType, more: Mapping[str, Any]
    ) -> tuple[str, datetime | None]:
        """The iterator, and the time of the answer on the service's clock."""
        request: dict[str, Any] = {
            **_name(stream),
            "ShardId": shard_id,
            "ShardIteratorType": kind,
            **more,
        }
        with kinesis_errors("GetShardIterator", f"{shard_id} of {stream.name}"):
            answer = self._client.get_shard_iterator(**request)
        iterator = answer.get("ShardIterator")
        if not iterator:
            raise UnavailableError(
                f"GetShardIterator gave none for {shard_id} of {stream.name}",
                code="NoIterator",
                operation="GetShardIterator",
            )
        return iterator, _date_of(answer["ResponseMetadata"]["HTTPHeaders"].get("date"))

    def get_records(
        self, stream: StreamId, shard_id: str, iterator: str, limit: int
    ) -> RecordsPage:
        """See `KinesisClient`. One attempt; an unreadable body raises `UnavailableError`."""
        request: dict[str, Any] = {"ShardIterator": iterator, "Limit": limit}
        if stream.arn is not None:
            request["StreamARN"] = stream.arn
        form = self._body_format or self._faster_format(stream)
        _OURS.body_format = form
        try:
            with kinesis_errors("GetRecords", f"{shard_id} of {stream.name}"):
                answer: Mapping[str, Any] = self._client.get_records(**request)
            body, content_type = answer[_BODY]
            with _DECODING:
                page = decode_page(body, content_type, stream.name, shard_id)
        except (UnavailableError, InvalidRequestError):
            self._cbor_failures += form == "cbor"
            raise
        finally:
            _OURS.body_format = None
        self._cbor_works = self._cbor_works or form == "cbor"
        if page.records.num_rows:
            large = (
                page.bytes >= MIN_BYTES or page.bytes > CBOR_RECORD_BYTES * page.records.num_rows
            )
            self._faster[stream.serialized] = "cbor" if large else "json"
        return page

    def _faster_format(self, stream: StreamId) -> BodyFormat:
        if not self._cbor_works and self._cbor_failures >= CBOR_TRIALS:
            return "json"
        return self._faster.get(stream.serialized, "json")

    def _retry_transient(
        self,
        operation: str,
        about: str,
        call: Callable[[], _T],
        *,
        attempts: int = MAX_ATTEMPTS,
        throttle_seconds: float | None = None,
    ) -> _T:
        """Call until it works; the last error is raised. `throttle_seconds`: a fixed wait after
        throttling instead of a growing one.
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
    """Have GetRecords bodies read by one call instead of 64 KiB pieces that are then joined: an
    eighth of the processor time of a full page.

    There is no public hook between sending and joining. Where botocore's inside is not as expected,
    everything stays as it is, only slower.
    """
    endpoint = getattr(client, "_endpoint", None)
    if getattr(getattr(endpoint, "_send", None), "reads_in_one_piece", False):
        return
    limit_bodies(client)
    send = getattr(endpoint, "_send", None)
    if endpoint is None or send is None:
        return

    def send_and_read(request: AWSPreparedRequest) -> AWSResponse:
        if _OURS.body_format is None:
            return cast("AWSResponse", send(request))
        request.stream_output = True
        response: Any = send(request)
        try:
            with DEADLINES.limited(socket_of(response.raw), BODY_SECONDS):
                # what `content` keeps once it has joined the pieces
                response._content = response.raw.read()  # noqa: SLF001
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise HTTPClientError(error=error) from error
        return cast("AWSResponse", response)

    send_and_read.reads_in_one_piece = True  # type: ignore[attr-defined] # (a mark, so that a client is wrapped once)
    endpoint._send = send_and_read  # noqa: SLF001 (see above)


def account_of(arn: str) -> str:
    """The account id inside a stream's ARN. Raises `SettingsError` for other text."""
    parts = arn.split(":", _ARN_PARTS - 1)
    if (
        len(parts) != _ARN_PARTS
        or parts[2] != "kinesis"
        or not parts[4].isdigit()
        or not parts[5].startswith("stream/")
    ):
        raise SettingsError(
            f"{arn!r} is not a stream's ARN; write arn:aws:kinesis:<region>:<account>:stream/<name>"
        )
    return parts[4]


def _name(stream: StreamId) -> dict[str, Any]:
    return {"StreamName": stream.name} | (
        {"StreamARN": stream.arn} if stream.arn is not None else {}
    )


def _shard(item: Mapping[str, Any]) -> Shard:
    keys, numbers = item["HashKeyRange"], item["SequenceNumberRange"]
    return Shard(
        shard_id=item["ShardId"],
        hash_key_range=HashKeyRange(int(keys["StartingHashKey"]), int(keys["EndingHashKey"])),
        starting_sequence_number=numbers["StartingSequenceNumber"],
        ending_sequence_number=numbers.get("EndingSequenceNumber"),
        parent_shard_id=item.get("ParentShardId"),
        adjacent_parent_shard_id=item.get("AdjacentParentShardId"),
    )


def _ask(params: dict[str, Any], **_: object) -> None:
    """Runs before the request is signed: turns it into CBOR if that is wanted."""
    if _OURS.body_format == "cbor":
        params["headers"]["Content-Type"] = CBOR_CONTENT_TYPE
        params["body"] = cbor2.dumps(json.loads(params["body"]))


def _take_body(
    response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object
) -> None:
    """Runs before botocore parses: a good answer is set aside and an empty one left in its place; a
    refusal in CBOR becomes JSON, which botocore can read.
    """
    if _OURS.body_format is None:
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


def _date_of(header: str | None) -> datetime | None:
    """The time of a Date header; None when there is none, or it cannot be read."""
    try:
        return None if header is None else parsedate_to_datetime(header).astimezone(UTC)
    except ValueError:
        return None
