"""The number of losses of records, the number that a person acknowledged, and the last loss.

It is the attribute `kclpLosses` of the client-version row `Migration3.0`, next to the identity of
the application (`identity`), for the same reasons. `CoordinatorRows.change_losses` writes it
conditionally. Earlier losses are in the logs, as `records_lost` and `table_restored`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import reduce
from typing import Annotated, Final

import msgspec

from kcl_pipeline.events import LossReason, RecordsLost, TableRestored
from kcl_pipeline.leases.attributes import MAX_COUNTER, MAX_LONG, MAX_MILLIS, record_of
from kcl_pipeline.text import counted, printable

MAX_TEXT: Final = 20_000
"""Largest number of characters of the record. The longest names and positions fit."""

_MAX_NAME: Final = 2048
_MAX_SHORT: Final = 300
_Name = Annotated[str, msgspec.Meta(max_length=_MAX_NAME)]
_Short = Annotated[str, msgspec.Meta(max_length=_MAX_SHORT)]
_Millis = Annotated[int, msgspec.Meta(ge=0, le=MAX_MILLIS)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNTER)]
_TableVersion = tuple[_Short, Annotated[int, msgspec.Meta(ge=0, le=MAX_LONG)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A `RecordsLost` or a `TableRestored` as it is recorded.

    Positions are texts, because they are only shown.

    Attributes:
        shard: The lease key, with the stream in front unless the key contains it. After a RESTORE:
            the version that it made.
        after: Start of the loss (exclusive). After a RESTORE: the version that was restored.
        end: End of the loss: `until` a position (inclusive), `before` one (exclusive).
        recorded_millis: When it was reported, epoch milliseconds.
        restored: Id of the table, and the version that a RESTORE made. None: another reason.
    """

    shard: _Name
    reason: LossReason
    reporter: _Name
    recorded_millis: _Millis
    after: _Short | None = None
    end: _Short | None = None
    first_arrival_millis: _Millis | None = None
    last_arrival_millis: _Millis | None = None
    restored: _TableVersion | None = None

    @classmethod
    def of(cls, event: RecordsLost | TableRestored, now_millis: int) -> Loss:
        """Return the record of an event."""
        if isinstance(event, TableRestored):
            return cls(
                shard=_cut(f"version {event.version} of the table {event.table_id}"),
                reason=LossReason.TABLE_RESTORED,
                reporter="a reader of its log",
                recorded_millis=now_millis,
                after=_cut(event.restored_to, _MAX_SHORT),
                restored=(_cut(event.table_id, _MAX_SHORT), event.version),
            )
        is_in_key = event.stream is None or ":" in event.lease_key
        ends = {"until": event.until, "before": event.before}
        return cls(
            shard=_cut(event.lease_key if is_in_key else f"{event.stream} {event.lease_key}"),
            reason=event.reason,
            reporter=_cut(event.reporter),
            recorded_millis=now_millis,
            after=None if event.after is None else str(event.after),
            end=" ".join(f"{name} {end}" for name, end in ends.items() if end is not None) or None,
            first_arrival_millis=_millis(event.first_arrival_millis),
            last_arrival_millis=_millis(event.last_arrival_millis),
        )

    @property
    def identity(self) -> tuple[str, str, str | None]:
        """Shard, reason and start. A repeated report has the same, but may have another end."""
        return (self.shard, self.reason, self.after)

    @property
    def sentence(self) -> str:
        """What was lost, when it was recorded, and who reported it."""
        shard, at = printable(self.shard), f"recorded {_time_text(self.recorded_millis)}"
        if self.restored is not None:
            return (
                f"RESTORE in {shard} to {printable(self.after or 'an earlier one')}, {at}: rows "
                "after it are gone and are not read again; `kcl-pipeline do seek -p PIPELINE --to "
                "TIME --pause --yes` reads the records since TIME again"
            )
        facts = [
            *(() if self.after is None else (f"after {printable(self.after)}",)),
            *(() if self.end is None else (printable(self.end),)),
        ]
        for name in ("first", "last"):
            millis = getattr(self, f"{name}_arrival_millis")
            if millis is not None:
                facts.append(f"{name} arrival {_time_text(millis)}")
        return f"{shard} ({', '.join([self.reason, *facts])}), {at} by {printable(self.reporter)}"


def _cut(text: str, most: int = _MAX_NAME) -> str:
    return printable(text, most)[:most]


def _millis(millis: int | None) -> int | None:
    return None if millis is None else min(max(millis, 0), MAX_MILLIS)


def _time_text(millis: int) -> str:
    return datetime.fromtimestamp(millis / 1000, UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The losses of an application.

    The number may be too high, never too low: a loss counts again if it is reported again after
    another one.

    Attributes:
        count: Number of losses.
        acknowledged: The number that a person has acknowledged; at most `count`.
        acknowledged_millis: Time of the last acknowledgement, epoch milliseconds.
        last: The last loss. None: `count` is 0.
        restored: Id of the table and its highest version of a RESTORE that was counted. Every
            reader of its log may report the RESTORE again, also after it was acknowledged.
    """

    count: _Count = 0
    acknowledged: _Count = 0
    acknowledged_millis: _Millis | None = None
    last: Loss | None = None
    restored: _TableVersion | None = None

    def __post_init__(self) -> None:
        if self.acknowledged > self.count or (self.count == 0) != (self.last is None):
            raise ValueError("count, acknowledged and last contradict each other")

    @property
    def unacknowledged(self) -> int:
        """Number of losses that are not acknowledged."""
        return self.count - self.acknowledged

    @property
    def sentence(self) -> str:
        """The numbers and the last loss."""
        if self.last is None:
            return "no loss of records is recorded"
        millis = self.acknowledged_millis
        at = "" if millis is None else f" at {_time_text(millis)}"
        return (
            f"{counted(self.count, 'loss', 'losses')} of records, {self.acknowledged} "
            f"acknowledged{at}; the last: {self.last.sentence}"
        )

    def with_losses(self, losses: Iterable[Loss]) -> Losses:
        """Count losses, oldest first. A repeated report of the last one changes nothing."""
        return reduce(Losses._with, losses, self)

    def _with(self, loss: Loss) -> Losses:
        if loss.restored is not None and self.restored is not None:
            (table_id, version), (counted_id, highest) = loss.restored, self.restored
            if table_id == counted_id and version <= highest:
                return self
        count = self.count + 1
        if self.last is not None and self.last.identity == loss.identity:
            if self.last.end == loss.end:
                return self
            # More of a loss that nobody has acknowledged is not one more loss.
            count -= self.unacknowledged > 0
        return replace(self, count=count, last=loss, restored=loss.restored or self.restored)

    def with_acknowledged(self, shown: Losses, now_millis: int) -> Losses:
        """Acknowledge the number of losses in `shown`. Later ones are not acknowledged.

        Args:
            shown: An earlier state of this record, which a person has seen.
            now_millis: The time, epoch milliseconds.
        """
        number = min(shown.count, self.count)
        # More of the last loss may have been recorded since then, without a further count.
        if number == self.count and self.last != shown.last:
            number -= 1
        if number <= self.acknowledged:
            return self
        return replace(self, acknowledged=number, acknowledged_millis=now_millis)


def losses_text(losses: Losses) -> str:
    """Return the value of the attribute: the same text for the same record."""
    return msgspec.json.encode(losses, order="deterministic").decode()


def losses_from_text(text: str) -> Losses:
    """Parse the value of the attribute.

    Raises:
        UnreadableRowError: The value is not a record of losses.
    """
    advice = "check it and remove it: the workers' logs have the losses as records_lost"
    return record_of(text, Losses, "kclpLosses", MAX_TEXT, advice)
