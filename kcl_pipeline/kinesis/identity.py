"""Confirm that a stream is still the one of the leases, and that a shard does not exist any more.

A single-stream lease key is only a shard id, so a re-created stream has shards with the same ids.
One response alone therefore does not prove that a shard has ended, or that it does not exist any
more. `StreamIdentityCheck` also requests the creation time of the stream. Creation times only grow.
So if a *later* response has the creation time of the original stream, the earlier response was
about that stream, too.
"""

from __future__ import annotations

import math
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.errors import NotFoundError, StreamReplacedError
from kcl_pipeline.kinesis.client import MIN_RETENTION_MILLIS, KinesisClient
from kcl_pipeline.planning.shard_sync import successors
from kcl_pipeline.shards import ChildShard, HashKeyRange, Shard, StreamId

REFUSAL_KEPT_SECONDS: Final = 5.0
"""How long all shards of a deleted stream share one response.

DescribeStreamSummary is limited to 20 calls per second for an account.
"""

StreamKey = tuple[str, int | None, int | None]
"""ARN or name of a stream, and its creation time, which the equality of `StreamId` ignores."""


@dataclass(slots=True)
class _Known:
    """What is known of one stream. Times are monotonic seconds.

    Attributes:
        lock: Held during calls about this stream.
        confirmed: When the last description that confirmed the stream began.
        refused: When the stream was refused, and why. None: never.
        listing: When the last listing began, and its shards. None: there is none.
    """

    lock: AbstractContextManager[object]
    confirmed: float = -math.inf
    refused: tuple[float, NotFoundError | StreamReplacedError] | None = None
    listing: tuple[float, tuple[Shard, ...]] | None = None


class StreamIdentityCheck:
    """Confirms ends and losses of shards. Thread-safe; one call at a time for each stream.

    Streams do not wait for each other: a call may be retried for several seconds.

    Attributes:
        deleted: The streams that are proven not to exist any more. The set is replaced as a whole.
    """

    def __init__(self, kinesis: KinesisClient, clock: Clock) -> None:
        self._kinesis = kinesis
        self._clock = clock
        self._guard = threading.Lock()
        self._known: dict[StreamKey, _Known] = {}
        self.deleted = frozenset[StreamKey]()

    def _of(self, stream: StreamId) -> _Known:
        key = stream_key(stream)
        with self._guard:
            if key not in self._known:
                self._known[key] = _Known(self._clock.lock())
            return self._known[key]

    def confirm(self, stream: StreamId, since: float) -> None:
        """Confirm that the name belonged to the resolved stream at `since` or later.

        A stream whose creation time is not known at all cannot be checked, and is accepted.

        Args:
            stream: The resolved stream.
            since: Time in monotonic seconds.

        Raises:
            StreamReplacedError: The name belongs to another stream now.
            NotFoundError: The stream does not exist any more.
            AwsError: DescribeStreamSummary failed.
        """
        if not _is_known(stream):
            return
        known = self._of(stream)
        with known.lock:
            if known.confirmed >= since:
                return
            now = self._clock.monotonic()
            if known.refused is not None and now - known.refused[0] < REFUSAL_KEPT_SECONDS:
                refusal = known.refused[1]
                raise type(refusal)(str(refusal), code=refusal.code, operation=refusal.operation)
            try:
                require_same_stream(self._kinesis, stream)
            except (NotFoundError, StreamReplacedError) as error:
                known.refused = now, error
                with self._guard:
                    self.deleted |= {stream_key(stream)}
                raise
            known.confirmed = now

    def was_confirmed(self, stream: StreamId) -> bool:
        """Return whether the stream has existed since this check was made."""
        return self._of(stream).confirmed > -math.inf

    def successors_of_gone(
        self, stream: StreamId, shard_id: str, hash_key_range: HashKeyRange | None
    ) -> tuple[ChildShard, ...] | None:
        """Return the oldest shards that follow a shard which the stream does not list any more.

        Returns:
            None if the stream lists the shard, or lists no shard.

        Raises:
            AwsError: As in `confirm`, or ListShards failed. It is not known whether the shard
                exists.
        """
        try:
            shards = self._listed(stream, self._clock.monotonic())
        except NotFoundError:
            # Only a description proves that the stream was deleted (`deleted`).
            self.confirm(stream, self._clock.monotonic())
            raise
        self.confirm(stream, self._clock.monotonic())
        if not shards or any(shard.shard_id == shard_id for shard in shards):
            return None
        return successors(shards, shard_id, hash_key_range)

    def _listed(self, stream: StreamId, since: float) -> tuple[Shard, ...]:
        known = self._of(stream)
        with known.lock:
            if known.listing is not None and known.listing[0] >= since:
                return known.listing[1]
            now = self._clock.monotonic()
            shards = self._kinesis.list_shards(stream)
            known.listing = now, shards
            return shards

    def retention_millis(self, stream: StreamId) -> int:
        """Return the retention period of the stream now.

        Raises:
            StreamReplacedError: The name belongs to another stream now.
            NotFoundError: The stream does not exist any more.
            AwsError: DescribeStreamSummary failed.
        """
        hours = describe(self._kinesis, stream).retention_hours
        return MIN_RETENTION_MILLIS if hours is None else hours * 3600 * 1000


def stream_key(stream: StreamId) -> StreamKey:
    """Return the key of a stream in `StreamIdentityCheck.deleted`."""
    return stream.arn or stream.name, stream.created_millis, stream.creation_epoch


def _is_known(stream: StreamId) -> bool:
    """Return whether the creation time of the stream is known."""
    return stream.created_millis is not None or stream.creation_epoch is not None


def _is_created_at(stream: StreamId, millis: int) -> bool:
    """Compare creation times. A stream from a lease key has its time in whole seconds."""
    if stream.created_millis is not None:
        return stream.created_millis == millis
    return stream.creation_epoch == millis // 1000


def require_same_stream(kinesis: KinesisClient, stream: StreamId) -> None:
    """Check with one call that the name still belongs to the stream that was resolved.

    Raises:
        StreamReplacedError: The name belongs to another stream now.
        NotFoundError: The stream does not exist any more.
        AwsError: DescribeStreamSummary failed.
    """
    if _is_known(stream):
        describe(kinesis, stream)


def describe(kinesis: KinesisClient, stream: StreamId) -> StreamId:
    """Describe a stream again.

    Raises:
        StreamReplacedError: The name belongs to another stream now.
        NotFoundError: The stream does not exist any more.
        AwsError: DescribeStreamSummary failed.
    """
    found = kinesis.resolve_stream(stream.arn or stream.name, multi_stream=False)
    is_compared = _is_known(stream) and found.created_millis is not None
    if is_compared and not _is_created_at(stream, found.created_millis or 0):
        since = stream.created_millis or (stream.creation_epoch or 0) * 1000
        raise StreamReplacedError(
            f"the stream {stream.arn or stream.name} was deleted and created again: "
            f"created at {found.created_millis} ms, the leases belong to the stream created at "
            f"{since} ms",
            code="StreamReplaced",
            operation="DescribeStreamSummary",
        )
    return found
