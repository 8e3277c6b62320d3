"""Announces a batch as a worker does that has lost the race for a version."""

from __future__ import annotations

from collections.abc import Sequence

from kcl_pipeline.batch import DataFile
from kcl_pipeline.delta.sink import DeltaCommitter
from kcl_pipeline.sinks.announcements import AnnouncedBatch
from tests.support.delta_tables import Entry


def announce(
    sink: DeltaCommitter, files: Sequence[DataFile], *entries: Entry, application: str = "app"
) -> AnnouncedBatch:
    """The announced batch; the sink's table exists."""
    head = sink._log.read()
    assert head is not None
    expected = {f"{application}/{one.key}": one.expected for one in entries}
    becomes = {f"{application}/{one.key}": one.becomes for one in entries}
    store = sink._announcements
    batch = store.announce(head.form, head.table_id, files, expected, becomes, sink._log)
    assert batch is not None
    return batch


def contend(sink: DeltaCommitter) -> None:
    """Let the sink know that another writer was faster, so that it looks for announced batches."""
    sink._pace.lost(2)
