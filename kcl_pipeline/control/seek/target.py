"""Where an operator wants to read from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from kcl_pipeline.errors import SettingsError
from kcl_pipeline.position import AT_TIMESTAMP, LATEST, TRIM_HORIZON, Position
from kcl_pipeline.text import in_utc, printable

_AGO: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?) ?(s|min|m|h|d)")
_SECONDS: Final = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}
_WRITE: Final = (
    "write one of --to TRIM_HORIZON, --to LATEST, --to 2026-11-23T09:00:00Z, --ago 10m, and "
    "--after SEQUENCE_NUMBER"
)


@dataclass(frozen=True, slots=True)
class SeekTarget:
    """The wanted position.

    Attributes:
        kind: `AFTER` is a sequence number, which belongs to one shard.
        position: The checkpoint that means it.
        millis: The time of AT_TIMESTAMP, in epoch milliseconds.
    """

    kind: Literal["TRIM_HORIZON", "LATEST", "AT_TIMESTAMP", "AFTER"]
    position: Position
    millis: int | None = None

    @property
    def time(self) -> datetime | None:
        """The time of AT_TIMESTAMP."""
        return None if self.millis is None else datetime.fromtimestamp(self.millis / 1000, UTC)

    def __str__(self) -> str:
        if self.time is not None:
            return f"AT_TIMESTAMP {self.time.isoformat(timespec='milliseconds')}"
        return f"after {self.position}" if self.kind == "AFTER" else self.kind


def seek_target(
    to: str | None, ago: str | None, after: str | None, now_seconds: float
) -> SeekTarget:
    """Parse the wanted position.

    Args:
        to: TRIM_HORIZON, LATEST, or a time with an offset, as in ISO 8601.
        ago: A time before now, such as `10m`.
        after: A sequence number, or `number/sub-sequence number`. The next record is read first.
        now_seconds: Now, in epoch seconds.

    Raises:
        SettingsError: Not exactly one of the three is given, or its value is wrong.
    """
    if [to, ago, after].count(None) != 2:  # noqa: PLR2004 (one of three)
        raise SettingsError(f"the position is missing, or given twice; {_WRITE}")
    if after is not None:
        return SeekTarget("AFTER", _position(after))
    if ago is not None:
        seconds = duration_seconds(ago)
        if seconds is None:
            raise SettingsError(f"--ago '{printable(ago)}' is not a time; write 30s, 10m, 2h or 1d")
        return _at(now_seconds - seconds, now_seconds)
    text = (to or "").strip()
    if text.upper() == "TRIM_HORIZON":
        return SeekTarget("TRIM_HORIZON", TRIM_HORIZON)
    if text.upper() == "LATEST":
        return SeekTarget("LATEST", LATEST)
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise SettingsError(f"--to '{printable(text)}' is not a position; {_WRITE}") from error
    if time.tzinfo is None:
        advice = in_utc(time)
        raise SettingsError(f"--to {printable(text)} has no time zone; write {advice} for UTC")
    return _at(time.timestamp(), now_seconds)


def duration_seconds(text: str) -> float | None:
    """Return the seconds of a duration such as `10m`. None: the text is no duration."""
    match = _AGO.fullmatch(text.strip())
    return None if match is None else float(match[1]) * _SECONDS[match[2]]


def _at(seconds: float, now_seconds: float) -> SeekTarget:
    if not 0 <= seconds <= now_seconds:
        raise SettingsError(
            "the time is in the future, or before 1970; write a time that has passed, or LATEST"
        )
    return SeekTarget("AT_TIMESTAMP", AT_TIMESTAMP, int(seconds * 1000))


def _position(text: str) -> Position:
    number, _, sub = text.strip().partition("/")
    try:
        found = Position(number, int(sub or "0"))
    except ValueError as error:
        raise SettingsError(f"--after: {error}") from error
    if found.is_sentinel:
        raise SettingsError(f"--after {number} is not a sequence number; {_WRITE}")
    return found
