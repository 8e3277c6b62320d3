"""Announces a batch as a worker does that has lost the race for a version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kcl_pipeline.batch import DataFile
from kcl_pipeline.delta.sink import DeltaCommitter
from kcl_pipeline.sinks.announcements import PreparedBatch
from kcl_pipeline.sinks.sink import Entry


def announce(
    sink: DeltaCommitter, files: Sequence[DataFile], *entries: Entry, application: str = "app"
) -> PreparedBatch:
    """The announced batch; the sink's table exists."""
    head = sink._log.read()
    assert head is not None
    named = tuple(replace(one, key=f"{application}/{one.key}") for one in entries)
    batch = PreparedBatch(head.table_id, tuple(files), named)
    return sink._announcements.announce(batch, head, sink._log)


def contend(sink: DeltaCommitter) -> None:
    """Let the sink know that another writer was faster, so that it looks for announced batches."""
    sink._pace.lost(2)
