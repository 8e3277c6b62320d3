"""What an operator wants to replay."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from kcl_pipeline.control.seek import duration_seconds
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.leases.application.replay_record import ReplayRecord
from kcl_pipeline.leases.attributes import MAX_MILLIS
from kcl_pipeline.text import in_utc, printable

_ID: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FORMS: Final = "write a time such as 2026-11-23T09:00:00Z, or a time before now such as 10m"


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """The options of a replay. Only the id is needed to continue one of a time range.

    Attributes:
        replay_id: Identity of the replay. None: a new one is drawn.
        begin: First arrival time (inclusive): a time with an offset, or a time before now.
        end: Last arrival time (exclusive), likewise. None: now.
        into: Address of a side table.
        in_place: Write to the table of the pipeline.
        only_stream: Name or ARN of the only stream. None: all streams.
        dead_letters: Replay the dead letters that are not marked as replayed. The times are those
            at which they failed, and may be missing.
    """

    replay_id: str | None = None
    begin: str | None = None
    end: str | None = None
    into: str | None = None
    in_place: bool = False
    only_stream: str | None = None
    dead_letters: bool = False

    def __post_init__(self) -> None:
        if self.replay_id is not None and not _ID.fullmatch(self.replay_id):
            raise SettingsError(
                f"the id '{printable(self.replay_id)}' is not usable; write 1 to 32 of the "
                "characters a-z 0-9 -, such as 'late-orders'"
            )
        if self.into is not None and self.in_place:
            raise SettingsError("--into and --in-place are both given; write one of them")

    def record(self, now_seconds: float) -> ReplayRecord:
        """Return the record of a new replay.

        Args:
            now_seconds: Current time in epoch seconds.

        Raises:
            SettingsError: An option is missing or wrong.
        """
        if self.begin is None and not self.dead_letters:
            raise SettingsError(f"--from is missing; {_FORMS}")
        if self.into is None and not self.in_place:
            raise SettingsError(
                "the table is missing; write --into ADDRESS for a side table, or --in-place for "
                "the table of the pipeline"
            )
        begin = 0 if self.begin is None else _millis("--from", self.begin, now_seconds)
        # A clock of a worker may be ahead of this one: without --to, no dead letter is left out
        end = MAX_MILLIS if self.dead_letters else int(now_seconds * 1000)
        if self.end is not None:
            end = _millis("--to", self.end, now_seconds)
        if begin >= end:
            raise SettingsError(f"--from {self.begin} is not before --to {self.end or 'now'}")
        return ReplayRecord(begin, end, self.into, self.only_stream)

    def check(self, record: ReplayRecord, now_seconds: float) -> None:
        """Check that the options fit the replay that is continued.

        A time before now, such as `10m`, counts from the begin of the replay: it is not compared.

        Raises:
            SettingsError: They do not.
        """
        wrong = [
            option
            for option, given, expected in (
                ("--from", self._given("--from", self.begin, now_seconds), record.from_millis),
                ("--to", self._given("--to", self.end, now_seconds), record.to_millis),
                ("--into", self.into, record.into),
                ("--in-place", self.in_place or None, record.into is None),
                ("--only-stream", self.only_stream, record.only_stream),
            )
            if given is not None and given != expected
        ]
        if wrong:
            raise SettingsError(
                f"{wrong[0]} differs from the replay {self.replay_id!r}, which was begun before; "
                "omit all options but the id to continue it, or write another id"
            )

    def _given(self, option: str, text: str | None, now_seconds: float) -> int | None:
        is_relative = text is not None and duration_seconds(text) is not None
        return None if text is None or is_relative else _millis(option, text, now_seconds)


def _millis(option: str, text: str, now_seconds: float) -> int:
    """Return the first whole millisecond at or after a time, because arrival times are whole."""
    ago = duration_seconds(text)
    if ago is not None:
        millis = int((now_seconds - ago) * 1000)
    else:
        try:
            time = datetime.fromisoformat(text.strip())
        except ValueError as error:
            raise SettingsError(f"{option} '{printable(text)}' is not a time; {_FORMS}") from error
        if time.tzinfo is None:
            advice = in_utc(time)
            raise SettingsError(
                f"{option} {printable(text)} has no time zone; write {advice} for UTC"
            )
        millis = -((_EPOCH - time) // timedelta(milliseconds=1))
    if not 0 <= millis <= now_seconds * 1000:
        raise SettingsError(
            f"{option} {printable(text)} is in the future, or before 1970; {_FORMS}"
        )
    return millis
