"""The offset of a Kinesis query as Spark's log keeps it: per stream and shard, how far everything
has been given out.

`{"orders": {"shardId-000000000000": {"sequenceNumber": "4959…", "subSequenceNumber": 0}}}`, the
same that the options `startingPosition` and `endingPosition` take. Further keys of a shard: see
`ShardOffset`.
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
    """Everything up to `position` (inclusive) is before this offset.

    `timestamp_millis` goes with AT_TIMESTAMP (epoch milliseconds, inclusive).
    `first_sequence_number`: the batch that ends here was the shard's first and began with this
    record, so that it can be read again although its start was no number. `read_up_to_millis`
    (epoch): no record that arrived before this time is after `position`. `ended`: the shard is
    closed and `position` is its last record.
    """

    position: Position
    timestamp_millis: int | None = None
    first_sequence_number: str | None = None
    read_up_to_millis: int | None = None
    ended: bool = False

    def to_json(self) -> dict[str, Any]:
        """The form in Spark's log; what is not there is left out."""
        answer: dict[str, Any] = {"sequenceNumber": self.position.sequence_number}
        if not self.position.is_sentinel:
            answer["subSequenceNumber"] = self.position.sub_sequence_number
        more = {
            "timestamp": self.timestamp_millis,
            "firstSequenceNumber": self.first_sequence_number,
            "readUpTo": self.read_up_to_millis,
        }
        answer |= {key: value for key, value in more.items() if value is not None}
        return answer | ({"ended": True} if self.ended else {})


Offset = dict[str, dict[str, ShardOffset]]
"""Stream name, then shard id."""


def offset_to_json(offset: Offset) -> dict[str, Any]:
    """For Spark's log; streams and shards in order, so that equal offsets are equal text."""
    return {
        stream: {shard: shards[shard].to_json() for shard in sorted(shards)}
        for stream, shards in sorted(offset.items())
    }


def offset_from_json(value: object) -> Offset:
    """Read an offset. Raises `ValueError`, one sentence, for anything that is not one."""
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
