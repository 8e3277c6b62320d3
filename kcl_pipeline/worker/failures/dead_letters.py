"""Write the failed records of a batch to the dead letters, once."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from kcl_pipeline.batch import TransactionalSink
from kcl_pipeline.clock import Clock
from kcl_pipeline.events import EventSink, RecordsDeadLettered
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.failures.failed_records import dead_letters, positions_of
from kcl_pipeline.worker.failures.splitting import SplitBatch


class DeadLetters:
    """Write failed records to the dead letters before the rest of their batch is committed.

    Args:
        worker_id: Names this worker in events.
        sink: Owns the dead-letter table.
        skip: Whether the records are only reported (policy `skip`).
        clock: Its wall time is written with the records.
        events: Receives `RecordsDeadLettered`.
    """

    def __init__(
        self,
        worker_id: str,
        sink: TransactionalSink,
        clock: Clock,
        events: EventSink,
        *,
        skip: bool,
    ) -> None:
        self._worker_id = worker_id
        self._sink = sink
        self._clock = clock
        self._events = events
        self._skip = skip

    def set_aside(self, part: SplitBatch, consumers: Mapping[str, ShardConsumer]) -> None:
        """Write the failed records of a part, except those that an earlier attempt wrote.

        Raises:
            SinkError: The records could not be written. Call again.
        """
        new = {}
        for key, records in part.failed.items():
            fresh = records.filter(
                pa.array([place not in consumers[key].set_aside for place in positions_of(records)])
            )
            if fresh.num_rows:
                new[key] = fresh
        if new and not self._skip:
            self._sink.write_dead_letters(
                dead_letters(new, part.batch.batch_id, self._clock.wall())
            )
        for key, records in new.items():
            consumers[key].set_aside.update(positions_of(records))
            error = records["error"][0].as_py()
            self._events(
                RecordsDeadLettered(
                    self._worker_id, key, records.num_rows, error, skipped=self._skip
                )
            )
