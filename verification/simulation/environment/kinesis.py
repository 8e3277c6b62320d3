"""The in-memory Kinesis, called through one host's simulated network."""

from __future__ import annotations

from datetime import datetime

from kcl_pipeline.kinesis.client import IteratorType, LatestIterator, RecordsPage, ShardFilterType
from kcl_pipeline.shards import Shard, StreamId
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from verification.simulation.environment.calls import Calls
from verification.simulation.environment.streams import Streams


class SimulatedKinesis:
    """`KinesisClient` whose every call is a scheduling point and can fail."""

    def __init__(self, streams: Streams, calls: Calls) -> None:
        self._streams = streams
        self._calls = calls
        self._clients: dict[str, InMemoryKinesis] = {}

    def _of(self, name_or_arn: str) -> InMemoryKinesis:
        """The client of the stream's account."""
        client = self._clients.get(name_or_arn)
        if client is None:
            client = InMemoryKinesis(self._streams.model_of(name_or_arn))
            self._clients[name_or_arn] = client
        return client

    # documented by the protocol
    def resolve_stream(self, name_or_arn: str, *, multi_stream: bool) -> StreamId:  # noqa: D102
        with self._calls.call("kinesis.DescribeStreamSummary"):
            return self._of(name_or_arn).resolve_stream(name_or_arn, multi_stream=multi_stream)

    def list_shards(  # noqa: D102 (documented by the protocol)
        self,
        stream: StreamId,
        shard_filter: ShardFilterType | None = None,
        timestamp: datetime | None = None,
    ) -> tuple[Shard, ...]:
        with self._calls.call("kinesis.ListShards"):
            return self._of(stream.arn or stream.name).list_shards(stream, shard_filter, timestamp)

    # documented by the protocol
    def service_time(self, stream: StreamId) -> datetime | None:  # noqa: D102
        with self._calls.call("kinesis.ListShards"):
            return self._of(stream.arn or stream.name).service_time(stream)

    def get_shard_iterator(  # noqa: D102 (documented by the protocol)
        self,
        stream: StreamId,
        shard_id: str,
        iterator_type: IteratorType,
        *,
        sequence_number: str | None = None,
        timestamp: datetime | None = None,
    ) -> str:
        with self._calls.call("kinesis.GetShardIterator"):
            return self._of(stream.arn or stream.name).get_shard_iterator(
                stream,
                shard_id,
                iterator_type,
                sequence_number=sequence_number,
                timestamp=timestamp,
            )

    # documented by the protocol
    def latest_iterator(self, stream: StreamId, shard_id: str) -> LatestIterator:  # noqa: D102
        with self._calls.call("kinesis.GetShardIterator"):
            return self._of(stream.arn or stream.name).latest_iterator(stream, shard_id)

    def get_records(  # noqa: D102 (documented by the protocol)
        self, stream: StreamId, shard_id: str, iterator: str, limit: int
    ) -> RecordsPage:
        # Not `Calls.call`, for speed: most calls of a simulation are this one.
        self._calls.before("kinesis.GetRecords")
        expired = self._calls.expired()
        if expired is not None:
            raise expired
        page = self._of(stream.arn or stream.name).get_records(stream, shard_id, iterator, limit)
        self._calls.after("kinesis.GetRecords")
        return page
