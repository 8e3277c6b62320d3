"""Find the stream of a lease, also of a stream that the settings of this worker do not name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.kinesis.identity import stream_key
from kcl_pipeline.leases.application import InitialPositions, RecordedStream
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.shards import StreamId


class LeaseStreams:
    """Returns the stream of a lease. It knows those that were found at the start of the worker.

    The ARN of a stream names its positions in a table. That of a stream which was not found then
    follows from the ARN of any other recorded stream.

    All workers of an application read all of its leases, as with KCL's default stream
    configuration. No call is needed: a multi-stream lease key has account, name and creation epoch
    (protocol §1.3), and all streams are in one region.

    Attributes:
        shard_sync_of: Returns the initial position of a stream (`InitialPositions.of`).
    """

    def __init__(self, settings: ConsumerSettings) -> None:
        self._known: dict[str | None, StreamId] = {}
        self._arns: frozenset[str] = frozenset()
        self._positions = InitialPositions(settings)
        self.shard_sync_of = self._positions.of

    def open(self, streams: Iterable[StreamId]) -> None:
        """Set the streams that were found at the start of the worker."""
        self._known = {
            None if one.creation_epoch is None else one.serialized: one for one in streams
        }
        self.note_record(())

    def note_record(self, streams: Iterable[RecordedStream]) -> None:
        """Note the recorded streams, also those that are missing or new.

        Their names decide whether the name of a stream is unique (`StreamId.label`).
        """
        recorded = tuple(streams)
        opened = (one.arn for one in self._known.values() if one.arn is not None)
        self._arns = self._arns.union(opened, (one.arn for one in recorded))
        self._positions.note_record(recorded)

    def opened(self) -> tuple[StreamId, ...]:
        """Return the streams that were found at the start of the worker."""
        return tuple(self._labelled(stream) for stream in self._known.values())

    def was_opened(self, stream: StreamId) -> bool:
        """Return whether this stream, and not a later one of its name, was found then."""
        known = self._known.get(None if stream.creation_epoch is None else stream.serialized)
        return known is not None and stream_key(known) == stream_key(stream)

    def of(self, lease: Lease) -> StreamId | None:
        """Return the stream of a lease; None if it has the other form, or is of a former stream."""
        if lease.stream is None:
            return self._renewed(lease.recreated_millis)
        if None in self._known:
            return None
        return self._labelled(self._known.get(lease.stream) or self._parsed(lease.stream))

    def _renewed(self, recreated_millis: int | None) -> StreamId | None:
        """Return the single stream, also if it was created again after the start of the worker."""
        known = self._known.get(None)
        if known is None or known.recreated_millis == recreated_millis:
            return known
        if (recreated_millis or 0) < (known.recreated_millis or 0):
            return None
        return replace(known, created_millis=recreated_millis, recreated_millis=recreated_millis)

    def _parsed(self, serialized: str) -> StreamId:
        stream = StreamId.parse(serialized)
        arn = min(self._arns, default=None)  # with its region
        if arn is None or stream.account is None:
            return stream
        arn = ":".join([*arn.split(":")[:4], stream.account, f"stream/{stream.name}"])
        return replace(stream, arn=arn)

    def _labelled(self, stream: StreamId) -> StreamId:
        """Return the stream with its ARN as label if another account has a stream of this name."""
        if stream.account is None or stream.arn is None:
            return stream
        is_shared = any(
            arn != stream.arn and arn.rpartition("/")[2] == stream.name for arn in self._arns
        )
        return replace(stream, label=stream.arn) if is_shared else stream
