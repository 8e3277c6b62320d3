"""Write the failed records of a batch to the dead letters, once."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from kcl_pipeline.events import RecordsDeadLettered
from kcl_pipeline.worker.consumer import ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.failures.failed_records import dead_letters, positions_of
from kcl_pipeline.worker.failures.splitting import SplitBatch


def write_dead_letters(
    parts: WorkerDependencies, part: SplitBatch, consumers: Mapping[str, ShardConsumer]
) -> None:
    """Write the failed records of a part, except those that an earlier attempt wrote.

    Call it before the rest of the batch is committed. With the policy `skip`, the records are only
    reported.

    Raises:
        SinkError: The records could not be written. Call again.
    """
    skip = parts.settings.batch.failed_records == "skip"
    new = {}
    for key, records in part.failed.items():
        fresh = records.filter(
            pa.array([place not in consumers[key].set_aside for place in positions_of(records)])
        )
        if fresh.num_rows:
            new[key] = fresh
    if new and not skip:
        parts.sink.write_dead_letters(dead_letters(new, part.batch.batch_id, parts.clock.wall()))
    for key, records in new.items():
        consumers[key].set_aside.update(positions_of(records))
        error = records["error"][0].as_py()
        parts.events(
            RecordsDeadLettered(parts.worker_id, key, records.num_rows, error, skipped=skip)
        )
