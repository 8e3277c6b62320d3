"""What a replay replays, stored in its own tables, so that it can be continued.

It is the attribute `kclpReplay` of the client-version row `Migration3.0` in the coordinator-state
table of the replay. This module does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec

from kcl_pipeline.errors import UnreadableRowError
from kcl_pipeline.leases.attributes import MAX_MILLIS

REPLAY: Final = "kclpReplay"
MAX_TEXT: Final = 20_000
"""Largest number of characters of the attribute."""

_Text = Annotated[str, msgspec.Meta(max_length=4_096)]
_Millis = Annotated[int, msgspec.Meta(ge=0, le=MAX_MILLIS)]


@dataclass(frozen=True, slots=True)
class ReplayRecord:
    """A replay of a time range.

    Attributes:
        from_millis: First arrival time (inclusive), epoch milliseconds.
        to_millis: Last arrival time (exclusive), epoch milliseconds.
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
        """First arrival time (inclusive)."""
        return datetime.fromtimestamp(self.from_millis / 1000, UTC)

    @property
    def end(self) -> datetime:
        """Last arrival time (exclusive)."""
        return datetime.fromtimestamp(self.to_millis / 1000, UTC)


def replay_text(record: ReplayRecord) -> str:
    """Return the value of the attribute."""
    return msgspec.json.encode(record, order="deterministic").decode()


def replay_from_text(text: str) -> ReplayRecord:
    """Parse the value of the attribute.

    Raises:
        UnreadableRowError: The value is not a record of a replay.
    """
    about = f"the attribute {REPLAY} of the row Migration3.0"
    if len(text) > MAX_TEXT:
        raise UnreadableRowError(f"{about} has {len(text)} characters, more than {MAX_TEXT}")
    try:
        return msgspec.json.decode(text, type=ReplayRecord)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise UnreadableRowError(
            f"{about} cannot be read ({error}); begin another replay with another id"
        ) from error
