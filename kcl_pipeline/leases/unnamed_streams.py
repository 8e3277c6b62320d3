"""Recorded streams that the settings of a process do not name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kcl_pipeline.leases.application import ApplicationIdentity, ApplicationRecord
from kcl_pipeline.leases.recorded_stream import RecordedStream


def unnamed_streams(identity: ApplicationIdentity, names: Iterable[str]) -> tuple[str, ...]:
    """Return the recorded streams that are not in `names` (stream names or ARNs).

    Returns:
        Their names; the ARN if two accounts have a stream of that name.
    """
    counts = Counter(one.name for one in identity.streams)
    found = _unnamed(identity, names)
    return tuple(one.name if counts[one.name] == 1 else one.arn for one in found)


def streams_to_read(
    names: Sequence[str], record: ApplicationRecord | None, *, is_multi_stream: bool
) -> tuple[str, ...]:
    """Return names or ARNs: those of the settings, then the recorded streams that these lack."""
    if record is None or not is_multi_stream:
        return tuple(names)
    return (*names, *(one.arn for one in _unnamed(record.identity, names)))


def _unnamed(identity: ApplicationIdentity, names: Iterable[str]) -> list[RecordedStream]:
    """Return the recorded streams that `names` lacks.

    A name stands for one stream. If several recorded streams of that name are left, it is unknown
    for which, and all of them are returned.
    """
    named = set(names)
    others = [one for one in identity.streams if one.arn not in named]
    counts = Counter(one.name for one in others)
    return [one for one in others if one.name not in named or counts[one.name] > 1]
