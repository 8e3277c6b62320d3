"""Read only the records that arrived in a time range (`retrieval.arrived_from`, `_before`).

A record belongs to the range by its own arrival time. Kinesis does not promise that these times
increase. A shard is therefore read on for `ARRIVAL_TOLERANCE` after the end of the range. Then
reading jumps to the end of the shard, so that the end and the children of a closed shard are still
found.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from kcl_pipeline.batch import payload_bytes
from kcl_pipeline.kinesis.boto import BotoKinesis
from kcl_pipeline.kinesis.client import ARRIVAL_TOLERANCE, RecordsPage
from kcl_pipeline.shards import StreamId

MOST_BEHIND_MILLIS: Final = 3_600_000
"""Largest lag of a page without a record of the range.

With a lag of a day or more, `reader.GapWatch` looks for records that left retention: once a
minute the reader continues at its last record. Outside the range it would pass the same records
again and again.
"""


class BoundedKinesis(BotoKinesis):
    """A `KinesisClient` whose responses have the records of a time range only."""

    def get_records(
        self, stream: StreamId, shard_id: str, iterator: str, limit: int
    ) -> RecordsPage:
        """See `BotoKinesis.get_records`. After the range, the shard counts as read to its tip.

        The next iterator is then at LATEST, and the records in between are not read.
        """
        page = super().get_records(stream, shard_id, iterator, limit)
        settings = self._retrieval
        found = within(page, settings.arrived_from, settings.arrived_before)
        if not is_past(page, settings.arrived_before):
            return found
        following = page.next_iterator
        if following is not None and page.millis_behind_latest != 0:
            following = self.latest_iterator(stream, shard_id).iterator
        return replace(found, next_iterator=following, millis_behind_latest=0)


def within(page: RecordsPage, begin: datetime | None, end: datetime | None) -> RecordsPage:
    """Return the page with the records that arrived in a range.

    If none of its records did, its lag is at most `MOST_BEHIND_MILLIS`.

    Args:
        page: The page.
        begin: First arrival time (inclusive). None: no limit.
        end: Last arrival time (exclusive). None: no limit.
    """
    rows = page.records.num_rows
    if not rows:
        return page
    kept = page.records
    if begin is not None:
        kept = kept.filter(pc.greater_equal(_arrivals(kept), _scalar(begin)))
    if end is not None:
        kept = kept.filter(pc.less(_arrivals(kept), _scalar(end)))
    if kept.num_rows == rows:
        return page
    behind = page.millis_behind_latest
    if not kept.num_rows and behind is not None:
        behind = min(behind, MOST_BEHIND_MILLIS)
    return replace(page, records=kept, bytes=payload_bytes(kept), millis_behind_latest=behind)


def is_past(page: RecordsPage, end: datetime | None) -> bool:
    """Return whether all records of the page, and so the later ones, arrived after the range."""
    if end is None or not page.records.num_rows:
        return False
    return bool(pc.min(_arrivals(page.records)).as_py() >= end + ARRIVAL_TOLERANCE)


def _arrivals(records: pa.Table) -> pa.ChunkedArray:
    return records.column("approximate_arrival_timestamp")


def _scalar(time: datetime) -> pa.Scalar:
    return pa.scalar(time, pa.timestamp("us", tz="UTC"))
