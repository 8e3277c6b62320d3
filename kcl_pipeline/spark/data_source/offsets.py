"""Define the offset of a Kinesis query: per stream and shard, the end of the last batch.

Spark's log stores it as JSON:
`{"orders": {"shardId-000000000000": {"sequenceNumber": "4959…", "subSequenceNumber": 0}}}`.
The options `startingPosition` and `endingPosition` have the same form. `ShardOffset` lists the
other keys of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kcl_pipeline.position import AT_TIMESTAMP, LATEST, TRIM_HORIZON, Position

_KEYS: Final = {
    "sequenceNumber",
    "subSequenceNumber",
    "timestamp",
    "firstSequenceNumber",
    "readUpTo",
    "ended",
}
_SHAPE: Final = '{"stream": {"shardId-…": {"sequenceNumber": "4959…", "subSequenceNumber": 0}}}'


@dataclass(frozen=True, slots=True)
class ShardOffset:
    """The offset of one shard: all records up to `position` (inclusive) are before it.

    Attributes:
        position: Position of the last record.
        timestamp_millis: Time for AT_TIMESTAMP (epoch milliseconds, inclusive).
        first_sequence_number: First record of the shard's first batch, which ends here. It allows
            that batch to be read again although its start was not a sequence number.
        read_up_to_millis: No record that arrived before this time is after `position` (epoch).
        ended: The shard is closed, and `position` is its last record.
    """

    position: Position
    timestamp_millis: int | None = None
    first_sequence_number: str | None = None
    read_up_to_millis: int | None = None
    ended: bool = False

    def to_json(self) -> dict[str, Any]:
        """The form in Spark's log, without empty keys."""
        content: dict[str, Any] = {"sequenceNumber": self.position.sequence_number}
        if not self.position.is_sentinel:
            content["subSequenceNumber"] = self.position.sub_sequence_number
        more = {
            "timestamp": self.timestamp_millis,
            "firstSequenceNumber": self.first_sequence_number,
            "readUpTo": self.read_up_to_millis,
        }
        content |= {key: value for key, value in more.items() if value is not None}
        return content | ({"ended": True} if self.ended else {})


Offset = dict[str, dict[str, ShardOffset]]
"""Stream name, then shard id."""


def offset_to_json(offset: Offset) -> dict[str, Any]:
    """Convert for Spark's log. Streams and shards are sorted: equal offsets give equal text."""
    return {
        stream: {shard: shards[shard].to_json() for shard in sorted(shards)}
        for stream, shards in sorted(offset.items())
    }


def offset_from_json(value: object) -> Offset:
    """Parse an offset.

    Raises:
        ValueError: The value is not an offset. The message is one sentence.
    """
    if (
        not isinstance(value, Mapping)
        or not value
        or not all(isinstance(shards, Mapping) for shards in value.values())
    ):
        raise ValueError(f"offsets are written {_SHAPE}")
    return {
        str(stream): {
            str(shard): _shard_offset(str(shard), entry) for shard, entry in shards.items()
        }
        for stream, shards in value.items()
    }


def _shard_offset(shard: str, entry: object) -> ShardOffset:
    if isinstance(entry, str):
        entry = {"sequenceNumber": entry}
    if not isinstance(entry, Mapping) or set(entry) - _KEYS or "sequenceNumber" not in entry:
        raise ValueError(f"{shard} has {entry!r}; offsets are written {_SHAPE}")
    try:
        position = Position(str(entry["sequenceNumber"]), int(entry.get("subSequenceNumber", 0)))
        first = entry.get("firstSequenceNumber")
        offset = ShardOffset(
            position,
            _millis(entry, "timestamp"),
            None if first is None else str(first),
            _millis(entry, "readUpTo"),
            bool(entry.get("ended")),
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{shard}: {error}") from None
    if position.is_shard_end:
        raise ValueError(
            f'{shard} is at SHARD_END; write its last sequence number and "ended": true'
        )
    if (position == AT_TIMESTAMP) != (offset.timestamp_millis is not None):
        raise ValueError(
            f'{shard}: "timestamp" (epoch milliseconds) goes with the sequenceNumber '
            "AT_TIMESTAMP, and only with it"
        )
    if position.is_sentinel and position not in (AT_TIMESTAMP, TRIM_HORIZON, LATEST):
        raise ValueError(f"{shard} has a subSequenceNumber without a sequence number")
    return offset


def _millis(entry: Mapping[Any, Any], key: str) -> int | None:
    return None if entry.get(key) is None else int(entry[key])
