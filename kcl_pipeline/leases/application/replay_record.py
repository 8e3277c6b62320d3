"""What a replay replays, stored in its own tables, so that it can be continued.

It is the attribute `kclpReplay` of the client-version row `Migration3.0` in the coordinator-state
table of the replay. This module does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec

from kcl_pipeline.leases.attributes import MAX_MILLIS, record_of

REPLAY: Final = "kclpReplay"
MAX_TEXT: Final = 20_000
"""Largest number of characters of the attribute."""

_Text = Annotated[str, msgspec.Meta(max_length=4_096)]
_Millis = Annotated[int, msgspec.Meta(ge=0, le=MAX_MILLIS)]


@dataclass(frozen=True, slots=True)
class ReplayRecord:
    """A replay of a time range of the streams, or which dead letters one replays.

    The times are those at which the records arrived; of dead letters, at which they failed.

    Attributes:
        from_millis: First time (inclusive), epoch milliseconds.
        to_millis: Last time (exclusive), epoch milliseconds. `MAX_MILLIS`: there is no end.
        into: Address of the side table. None: the table of the pipeline.
        only_stream: Name or ARN of the only stream. None: all streams.
        complete: Whether all records of the range are in the table.
    """

    from_millis: _Millis
    to_millis: _Millis
    into: _Text | None = None
    only_stream: _Text | None = None
    complete: bool = False

    @property
    def begin(self) -> datetime:
        """First time (inclusive)."""
        return datetime.fromtimestamp(self.from_millis / 1000, UTC)

    @property
    def end(self) -> datetime:
        """Last time (exclusive)."""
        return datetime.fromtimestamp(self.to_millis / 1000, UTC)


def replay_text(record: ReplayRecord) -> str:
    """Return the value of the attribute: the same text for the same record."""
    return msgspec.json.encode(record, order="deterministic").decode()


def replay_from_text(text: str) -> ReplayRecord:
    """Parse the value of the attribute.

    Raises:
        UnreadableRowError: The value is not a record of a replay.
    """
    return record_of(text, ReplayRecord, REPLAY, MAX_TEXT, "begin another replay with another id")
