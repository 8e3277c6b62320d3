"""Announces a batch as a worker does that has lost the race for a version."""

from __future__ import annotations

from collections.abc import Sequence

from kcl_pipeline.batch import DataFile
from kcl_pipeline.delta.commits.announcements import Claim, PreparedBatch
from kcl_pipeline.delta.sink import DeltaCommitter


def announce(sink: DeltaCommitter, files: Sequence[DataFile], *claims: Claim) -> PreparedBatch:
    """The announced batch; the sink's table exists."""
    if not sink._log.peek():
        assert sink._log.refresh()
    return sink._announcements.announce(PreparedBatch(tuple(files), claims), sink._log)
