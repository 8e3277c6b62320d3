"""Subscribe to shards through boto3, over its HTTP/1.1 event stream.

Event payloads are decoded like GetRecords bodies, not by botocore's parser.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, cast

from botocore.eventstream import ParserError
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.errors import (
    AwsError,
    InvalidRequestError,
    NotFoundError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.kinesis.boto import from_client_error, given, kinesis_errors
from kcl_pipeline.kinesis.client import IteratorType, RecordsPage
from kcl_pipeline.kinesis.decode import decode_event
from kcl_pipeline.kinesis.fan_out.subscription import Consumer, Subscribed
from kcl_pipeline.shards import StreamId
from kcl_pipeline.threads import Spawn

if TYPE_CHECKING:
    from mypy_boto3_kinesis import KinesisClient as BotoKinesisClient
    from mypy_boto3_kinesis.type_defs import ConsumerDescriptionTypeDef

_OPERATION: Final = "SubscribeToShard"
IN_USE: Final = "ResourceInUseException"
_EVENT: Final = "SubscribeToShardEvent"

MAX_BUFFERED_EVENTS: Final = 1
"""Events of 2 MB at most. While the buffer is full, the thread does not read from the connection,
and flow control stops the service.
"""

CAPACITY_CHECK_SECONDS: Final = 0.1


class BotoFanOut:
    """The `FanOutClient` over a boto3 client. Thread-safe.

    The read time-out of the client ends a subscription without events.

    Args:
        client: The boto3 client.
        subscription: Creates a subscription from botocore's event stream, the name of the stream,
            the id of the shard, and the clock. None: one with a thread.
    """

    def __init__(
        self,
        client: BotoKinesisClient,
        subscription: Callable[[Any, str, str, Clock], Subscribed] | None = None,
    ) -> None:
        self._client = client
        self._subscription = subscription or BotoSubscription

    def describe_consumer(self, stream: StreamId, name: str) -> Consumer | None:
        """See `FanOutClient`. Returns None also if the stream does not exist."""
        found = described_consumer(self._client, _arn(stream), name)
        if found is None:
            return None
        return Consumer(found["ConsumerARN"], found["ConsumerStatus"] == "ACTIVE")

    def register_consumer(self, stream: StreamId, name: str) -> None:
        """See `FanOutClient`."""
        try:
            with kinesis_errors("RegisterStreamConsumer", f"consumer {name} of {stream.name}"):
                self._client.register_stream_consumer(StreamARN=_arn(stream), ConsumerName=name)
        except AwsError as error:
            if error.code != IN_USE:
                raise

    def subscribe(
        self,
        consumer_arn: str,
        stream: StreamId,
        shard_id: str,
        kind: IteratorType,
        clock: Clock,
        *,
        sequence_number: str | None = None,
        timestamp: datetime | None = None,
    ) -> Subscribed:
        """See `FanOutClient`."""
        position = {"Type": kind} | given(SequenceNumber=sequence_number, Timestamp=timestamp)
        with subscription_errors(f"{shard_id} of {stream.name}"):
            response: Any = self._client.subscribe_to_shard(
                ConsumerARN=consumer_arn, ShardId=shard_id, StartingPosition=cast("Any", position)
            )
        return self._subscription(response["EventStream"], stream.column, shard_id, clock)


def described_consumer(
    client: BotoKinesisClient, stream_arn: str, name: str
) -> ConsumerDescriptionTypeDef | None:
    """Return the consumer of a stream. None also if the stream does not exist."""
    try:
        with kinesis_errors("DescribeStreamConsumer", f"consumer {name} of {stream_arn}"):
            return client.describe_stream_consumer(StreamARN=stream_arn, ConsumerName=name)[
                "ConsumerDescription"
            ]
    except NotFoundError:
        return None


class BotoSubscription:
    """A subscription whose events a thread receives into a bounded buffer.

    Only this thread waits for the connection. No plain lock is held during a wait. The buffer has
    the bytes of events, which `take` decodes in its caller's thread: columns that each of many
    threads creates would stay in the memory arena of that thread.

    Args:
        events: The event stream of botocore.
        stream_name: Name of the stream.
        shard_id: The shard.
        clock: The clock.

    Attributes:
        error: The error that ended it. None: a normal end. Valid when `is_over`.
        received: Number of events so far.
    """

    def __init__(self, events: Any, stream_name: str, shard_id: str, clock: Clock) -> None:
        # botocore has no public access to the bytes of an event. Its parser creates a dict per
        # record, which takes ten times as long.
        self._messages: Iterator[Any] = events._event_generator  # noqa: SLF001
        self._raw: Any = events._raw_stream  # noqa: SLF001
        self._stream_name = stream_name
        self._shard_id = shard_id
        self._clock = clock
        self._guard = threading.Lock()
        self._buffer: deque[Any] = deque()
        self._waiting_since: float | None = clock.monotonic()
        self._capacity: StopSignal | None = None
        self._closed = False
        self._over = False
        self.error: Exception | None = None
        self.received = 0

    def start(self, name: str, spawn: Spawn) -> None:
        """Start to read, in a thread of this name."""
        spawn(name, self._pump)

    def take(self) -> RecordsPage | None:
        """Remove, decode and return the oldest event; None if there is none. Not thread-safe.

        An event that is an error, or cannot be decoded, ends the subscription.
        """
        with self._guard:
            if not self._buffer:
                return None
            message = self._buffer.popleft()
            if self._capacity is not None:
                self._capacity.set()
        try:
            with self._errors():
                page = page_of(message, self._stream_name, self._shard_id)
        except Exception as error:  # noqa: BLE001 (`SubscribedShard` raises it)
            # The events after it are dropped: reading continues where the last page ended.
            self.close()
            with self._guard:
                self.error, self._over = error, True
            return None
        self.received += 1
        if page.next_iterator is None:
            self.close()
            with self._guard:
                self._over = True
        return page

    @property
    def is_over(self) -> bool:
        """Whether the subscription has ended and all events were taken."""
        with self._guard:
            return self._over and not self._buffer

    def silent_seconds(self) -> float:
        """Return the time without data; 0 while the buffer is full, and after the end."""
        since = self._waiting_since
        return 0.0 if since is None else self._clock.monotonic() - since

    def close(self) -> None:
        """End the subscription and drop its events. Does not wait for the thread to end.

        Shuts the socket down, which wakes the thread that reads from it. That thread closes it.
        """
        with self._guard:
            self._closed = True
            self._buffer.clear()
            if self._capacity is not None:
                self._capacity.set()
        # These errors mean: it is closed already, or urllib3 is old. With an old urllib3 the thread
        # ends by the read time-out.
        with suppress(AttributeError, ValueError, RuntimeError, OSError):
            self._raw.shutdown()

    def _errors(self) -> AbstractContextManager[None]:
        return subscription_errors(f"{self._shard_id} of {self._stream_name}")

    def _pump(self) -> None:
        failure: Exception | None = None
        try:
            with self._errors():
                for message in self._messages:
                    if not is_event(message):
                        continue
                    self._waiting_since = None
                    if not self._put(message):
                        break
                    self._waiting_since = self._clock.monotonic()
        except Exception as error:  # noqa: BLE001 (`SubscribedShard` raises it)
            failure = error
        finally:
            self._raw.close()
            self._waiting_since = None
            with self._guard:
                # What `take` found in an event counts, not that it then shut the socket down.
                if not self._closed:
                    self.error = failure
                self._over = True

    def _put(self, message: Any) -> bool:
        """Wait until the buffer has capacity and append the event. Return False when closed."""
        while True:
            with self._guard:
                if self._closed:
                    return False
                if len(self._buffer) < MAX_BUFFERED_EVENTS:
                    self._buffer.append(message)
                    return True
                capacity = self._capacity = self._clock.signal()
            capacity.wait(CAPACITY_CHECK_SECONDS)


def is_event(message: Any) -> bool:
    """Whether a message of the event stream has records, or is an error."""
    headers = message.headers
    return (
        headers.get(":message-type") in ("exception", "error")
        or headers.get(":event-type") == _EVENT
    )


def page_of(message: Any, stream_name: str, shard_id: str) -> RecordsPage:
    """Return the records of an event.

    Raises:
        ClientError: The message is an error.
    """
    if message.headers.get(":message-type") in ("exception", "error"):
        raise _client_error(message)
    return decode_event(
        message.payload, str(message.headers.get(":content-type", "")), stream_name, shard_id
    )


def _client_error(message: Any) -> ClientError:
    """Return an error message of the event stream as botocore's exception."""
    code = message.headers.get(":exception-type") or message.headers.get(":error-code") or "Unknown"
    text = message.headers.get(":error-message") or message.payload.decode("utf-8", "replace")
    return ClientError({"Error": {"Code": str(code), "Message": str(text)}}, _OPERATION)


@contextmanager
def subscription_errors(about: str) -> Iterator[None]:
    """Translate errors in a block like `kinesis_errors`, and errors of a running event stream.

    If another process has a subscription to the shard, the error is `ThrottledError`, because the
    caller should wait.
    """
    try:
        yield
    except ClientError as error:
        ours = from_client_error(error, _OPERATION, about)
        if isinstance(ours, InvalidRequestError) and ours.code == IN_USE:
            raise ThrottledError(str(ours), code=ours.code, operation=_OPERATION) from error
        raise ours from error
    except (HTTPError, BotoCoreError, ParserError, OSError) as error:
        raise UnavailableError(
            f"{_OPERATION} on {about} was interrupted: {error}",
            code=type(error).__name__,
            operation=_OPERATION,
        ) from error


def _arn(stream: StreamId) -> str:
    if stream.arn is None:
        raise InvalidRequestError(
            f"stream {stream.name} has no ARN, and fan-out needs it; write its ARN in `streams`",
            operation="DescribeStreamConsumer",
        )
    return stream.arn
