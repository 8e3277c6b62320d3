"""Report records that left retention before this application read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.errors import AwsError, ThrottledError, UnavailableError
from kcl_pipeline.events import AwsTrouble, LossReason, RecordsLost
from kcl_pipeline.kinesis.retention import MIN_RETENTION_MILLIS, FoundGap
from kcl_pipeline.kinesis.retrieval import Retrieval
from kcl_pipeline.position import Position
from kcl_pipeline.shards import StreamId
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies

RETRY_SECONDS: Final = 5.0


@dataclass(slots=True)
class _Waiting:
    """A gap of one consumer. `due` is in monotonic seconds."""

    consumer: ShardConsumer
    found_gap: FoundGap
    due: float = 0.0


class RetentionLosses:
    """Judge the gaps that readers have found. Only the processing thread uses it.

    A gap is a loss if two facts hold. The lease was renewed after the gap was found; otherwise
    another worker may have read the records while this one was paused. And the time up to which the
    shard was read is unknown or has left retention; otherwise no record can have arrived and left.

    Args:
        dependencies: The dependencies of the worker.
        retrieval: Has the gaps, and knows the retention period of a stream.
    """

    def __init__(self, dependencies: WorkerDependencies, retrieval: Retrieval) -> None:
        self._dependencies = dependencies
        self._retrieval = retrieval
        self._waiting: list[_Waiting] = []
        self._reported: dict[str, Position] = {}

    def look(self, consumers: Mapping[str, ShardConsumer]) -> None:
        """Report the losses that are certain now. Gaps of leases that are not held are dropped.

        Args:
            consumers: The consumers of the held leases, by lease key.
        """
        for found in self._retrieval.gaps.take():
            consumer = consumers.get(found.lease_key)
            if consumer is not None:
                self._waiting.append(_Waiting(consumer, found))
        if self._waiting:
            self._waiting = [
                one
                for one in self._waiting
                if consumers.get(one.found_gap.lease_key) is one.consumer
                and not self._is_judged(one)
            ]

    def _is_judged(self, waiting: _Waiting) -> bool:
        now, found = self._dependencies.clock.monotonic(), waiting.found_gap
        if waiting.consumer.held.renewed_at <= found.found_at or now < waiting.due:
            return False
        if self._reported.get(found.lease_key) == found.gap.after:
            return True
        try:
            lost = self._loss(found)
        except AwsError as error:
            waiting.due = now + RETRY_SECONDS
            self._dependencies.events(AwsTrouble(f"retention of {found.lease_key}", str(error)))
            return False
        if lost is not None:
            self._reported[found.lease_key] = found.gap.after
            self._dependencies.events(lost)
        return True

    def _loss(self, found_gap: FoundGap) -> RecordsLost | None:
        gap, clock = found_gap.gap, self._dependencies.clock
        now = (
            round(clock.wall() * 1000)
            if gap.served_millis is None
            else gap.served_millis + round((clock.monotonic() - found_gap.found_at) * 1000)
        )
        read_up_to = gap.read_up_to_millis
        if read_up_to is not None and now - read_up_to < MIN_RETENTION_MILLIS:
            return None
        oldest = now - self._retention_millis(found_gap.stream)
        if read_up_to is not None and read_up_to > oldest:
            return None
        return RecordsLost(
            self._dependencies.worker_id,
            found_gap.lease_key,
            LossReason.LEFT_RETENTION,
            None if gap.after.is_sentinel else gap.after,
            first_arrival_millis=read_up_to,
            last_arrival_millis=oldest
            if gap.before_millis is None
            else min(oldest, gap.before_millis),
            stream=found_gap.stream.name,
            before=gap.before,
        )

    def _retention_millis(self, stream: StreamId) -> int:
        """Return the retention period; the shortest one if this worker must not ask for it."""
        try:
            return self._retrieval.identity.retention_millis(stream)
        except (ThrottledError, UnavailableError):
            raise
        except AwsError:
            return MIN_RETENTION_MILLIS
