"""Calls to Kinesis of a leader, during which it keeps its lock.

A call that is throttled or hangs lasts longer than the lock: DescribeStreamSummary sleeps up to
7.5 s between its attempts, ListShards up to 75 s, and a lock lasts 8 s. Without heartbeats the next
candidate would acquire the lock, make the same call, and lose it, too. No candidate would ever
assign a lease.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Final, TypeVar

from kcl_pipeline.background import Spawn
from kcl_pipeline.errors import AwsError
from kcl_pipeline.kinesis.client import (
    IteratorType,
    KinesisClient,
    LatestIterator,
    RecordsPage,
    ShardFilterType,
)
from kcl_pipeline.leader.election.lock import LeaderElection, NotLeadingError
from kcl_pipeline.shards import Shard, StreamId

_POLL_SECONDS: Final = 0.2
_T = TypeVar("_T")


class KeptKinesis:
    """A `KinesisClient` that sends heartbeats of the lock before, during and after each call.

    Args:
        kinesis: Makes the calls.
        election: The lock. A candidate that does not hold it sends no heartbeats.
        stop: Whether not to wait for a call any more.
        spawn: Starts the thread of a call. None: calls run on the calling thread, with heartbeats
            before and after them only.

    Raises:
        NotLeadingError: By every call: another process has the lock, or `stop` is true.
    """

    def __init__(
        self,
        kinesis: KinesisClient,
        election: LeaderElection,
        stop: Callable[[], bool],
        spawn: Spawn | None = None,
    ) -> None:
        self._kinesis = kinesis
        self._election = election
        self._stop = stop
        self._spawn = spawn

    # The protocol `KinesisClient` documents these methods.
    def resolve_stream(self, name_or_arn: str, *, multi_stream: bool) -> StreamId:  # noqa: D102
        return self._kept(
            lambda: self._kinesis.resolve_stream(name_or_arn, multi_stream=multi_stream)
        )

    def list_shards(  # noqa: D102
        self,
        stream: StreamId,
        shard_filter: ShardFilterType | None = None,
        timestamp: datetime | None = None,
    ) -> tuple[Shard, ...]:
        return self._kept(lambda: self._kinesis.list_shards(stream, shard_filter, timestamp))

    def service_time(self, stream: StreamId) -> datetime | None:  # noqa: D102
        return self._kept(lambda: self._kinesis.service_time(stream))

    def get_shard_iterator(  # noqa: D102
        self,
        stream: StreamId,
        shard_id: str,
        iterator_type: IteratorType,
        *,
        sequence_number: str | None = None,
        timestamp: datetime | None = None,
    ) -> str:
        return self._kept(
            lambda: self._kinesis.get_shard_iterator(
                stream,
                shard_id,
                iterator_type,
                sequence_number=sequence_number,
                timestamp=timestamp,
            )
        )

    def latest_iterator(self, stream: StreamId, shard_id: str) -> LatestIterator:  # noqa: D102
        return self._kept(lambda: self._kinesis.latest_iterator(stream, shard_id))

    def get_records(  # noqa: D102
        self, stream: StreamId, shard_id: str, iterator: str, limit: int
    ) -> RecordsPage:
        return self._kept(lambda: self._kinesis.get_records(stream, shard_id, iterator, limit))

    def _kept(self, call: Callable[[], _T]) -> _T:
        self._election.keep_alive()
        try:
            return call() if self._spawn is None else self._awaited(call, self._spawn)
        finally:
            # The heartbeat of the next write reports trouble with the table
            self._quietly_keep_alive()

    def _awaited(self, call: Callable[[], _T], spawn: Spawn) -> _T:
        results: list[_T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:  # noqa: BLE001 (raised below, by the waiting thread)
                errors.append(error)

        thread = spawn("leader-kinesis", run)
        while True:
            thread.join(_POLL_SECONDS)
            if errors:
                raise errors[0]
            if results:
                return results[0]
            if self._stop():
                raise NotLeadingError
            self._quietly_keep_alive()

    def _quietly_keep_alive(self) -> None:
        try:
            self._election.keep_alive()
        except AwsError:
            return
