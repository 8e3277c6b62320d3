"""Recorded streams that the settings of a process do not name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kcl_pipeline.leases.application.identity import ApplicationIdentity, ApplicationRecord
from kcl_pipeline.leases.application.recorded_stream import unnamed


def unnamed_streams(identity: ApplicationIdentity, names: Iterable[str]) -> tuple[str, ...]:
    """Return the recorded streams that are not in `names` (stream names or ARNs).

    Returns:
        Their names; the ARN if two accounts have a stream of that name.
    """
    counts = Counter(one.name for one in identity.streams)
    found = unnamed(identity.streams, names)
    return tuple(one.name if counts[one.name] == 1 else one.arn for one in found)


def streams_to_read(
    names: Sequence[str], record: ApplicationRecord | None, *, is_multi_stream: bool
) -> tuple[str, ...]:
    """Return names or ARNs: those of the settings, then the recorded streams that these lack."""
    if record is None or not is_multi_stream:
        return tuple(names)
    return (*names, *(one.arn for one in unnamed(record.identity.streams, names)))
