"""The record of lost records, until a person acknowledges them.

It is the attribute `kclpLosses` of the client-version row `Migration3.0`, next to the identity
of the application (`application`), for the same reasons. `CoordinatorRows.change_losses` writes it
conditionally.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec

from kcl_pipeline.events import LossReason, RecordsLost, TableRestored
from kcl_pipeline.leases.attributes import record_of
from kcl_pipeline.position import Position
from kcl_pipeline.text import printable

MAX_LOSSES: Final = 50
"""Largest number of losses in the record (our own limit). Older ones are only counted."""
MAX_TEXT: Final = 60_000
"""Largest number of characters of the record. With the identity, the row has at most 400 KB."""

_MAX_NAME: Final = 2048
_MAX_POSITION: Final = 150
_MAX_INT: Final = 2**63 - 1
_Name = Annotated[str, msgspec.Meta(max_length=_MAX_NAME)]
_PositionText = Annotated[str, msgspec.Meta(max_length=_MAX_POSITION)]
_Whole = Annotated[int, msgspec.Meta(ge=0, le=_MAX_INT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A `RecordsLost` or a `TableRestored` as it is recorded.

    Positions are texts, because they are only shown. After a RESTORE, `lease_key` names the version
    that it made, and `after` the version that was restored.

    Attributes:
        recorded_millis: When it was reported, epoch milliseconds.
        acknowledged_millis: When a person acknowledged it. None: not yet.
    """

    lease_key: _Name
    reason: LossReason
    reporter: _Name
    recorded_millis: _Whole
    stream: _Name | None = None
    after: _PositionText | None = None
    until: _PositionText | None = None
    before: _PositionText | None = None
    first_arrival_millis: _Whole | None = None
    last_arrival_millis: _Whole | None = None
    acknowledged_millis: _Whole | None = None

    @classmethod
    def of(cls, event: RecordsLost | TableRestored, now_millis: int) -> Loss:
        """Return the record of an event."""
        if isinstance(event, TableRestored):
            return cls(
                lease_key=f"version {event.version} of the table",
                reason=LossReason.TABLE_RESTORED,
                reporter="a reader of its log",
                recorded_millis=now_millis,
                after=printable(event.restored_to, _MAX_POSITION)[:_MAX_POSITION],
            )
        return cls(
            lease_key=_name(event.lease_key),
            reason=event.reason,
            reporter=_name(event.reporter),
            recorded_millis=now_millis,
            stream=None if event.stream is None else _name(event.stream),
            after=_text(event.after),
            until=_text(event.until),
            before=_text(event.before),
            first_arrival_millis=_time(event.first_arrival_millis),
            last_arrival_millis=_time(event.last_arrival_millis),
        )

    @property
    def identity(self) -> tuple[str | None, str, str, str | None]:
        """Stream, lease, reason and start of the loss. A repeated report has the same."""
        return (self.stream, self.lease_key, self.reason, self.after)

    @property
    def extent(self) -> tuple[tuple[str | None, str, str, str | None], str | None, str | None]:
        """The identity and the end of the loss. It changes if more records are lost."""
        return (self.identity, self.until, self.before)

    @property
    def label(self) -> str:
        """The lease key, with the stream in front unless the key contains it."""
        is_contained = self.stream is None or ":" in self.lease_key
        return self.lease_key if is_contained else f"{self.stream} {self.lease_key}"

    @property
    def sentence(self) -> str | None:
        """What a RESTORE did, and the command that reads the rows again. None: another reason."""
        if self.reason != LossReason.TABLE_RESTORED:
            return None
        return (
            f"RESTORE in {printable(self.label)} to {printable(self.after or 'an earlier one')}: "
            "rows after it are gone and are not read again; `kcl-pipeline seek -p PIPELINE --to "
            "TIME --pause --yes` reads the records since TIME again"
        )

    @property
    def shard_id(self) -> str:
        """The shard, which is the last part of the lease key."""
        return self.lease_key.rsplit(":", 1)[-1]


def _name(text: str) -> str:
    return printable(text, _MAX_NAME)[:_MAX_NAME]


def _text(position: Position | None) -> str | None:
    return None if position is None else str(position)


def _time(millis: int | None) -> int | None:
    return None if millis is None else min(max(millis, 0), _MAX_INT)


@dataclass(frozen=True, slots=True)
class LossLog:
    """The recorded losses of an application.

    Attributes:
        losses: The newest losses, oldest first; at most `MAX_LOSSES`.
        unlisted: Number of losses that are not acknowledged, and that do not fit into the record.
        acknowledged: Number of losses that were ever acknowledged.
        acknowledged_millis: Time of the last acknowledgement, epoch milliseconds.
    """

    losses: Annotated[tuple[Loss, ...], msgspec.Meta(max_length=MAX_LOSSES)] = ()
    unlisted: _Whole = 0
    acknowledged: _Whole = 0
    acknowledged_millis: _Whole | None = None

    @property
    def waiting(self) -> tuple[Loss, ...]:
        """The listed losses that are not acknowledged."""
        return tuple(loss for loss in self.losses if loss.acknowledged_millis is None)

    @property
    def unacknowledged(self) -> int:
        """Number of losses that are not acknowledged."""
        return len(self.waiting) + self.unlisted

    def with_losses(self, losses: Iterable[Loss]) -> LossLog:
        """Add losses. A repeated report changes nothing.

        A report of the same loss with another end replaces the earlier one, and has to be
        acknowledged, also if the earlier one was: more records are lost.
        """
        known = {loss.identity: loss for loss in self.losses}
        for loss in losses:
            before = known.get(loss.identity)
            if before is None or before.extent != loss.extent:
                known.pop(loss.identity, None)
                known[loss.identity] = loss
        return _cut(replace(self, losses=tuple(known.values())))

    def with_acknowledged(self, shown: LossLog, now_millis: int) -> LossLog:
        """Mark the losses that are in `shown`. Those that were recorded since then stay.

        Args:
            shown: An earlier state of this record, which a person has seen.
            now_millis: The time, epoch milliseconds.
        """
        seen = {loss.extent for loss in shown.waiting}
        listed = {loss.extent for loss in self.waiting}
        # Seen losses that were removed since then are among the unlisted ones.
        unlisted = min(shown.unlisted + len(seen - listed), self.unlisted)
        marked = len(seen & listed) + unlisted
        if not marked:
            return self
        losses = tuple(
            replace(loss, acknowledged_millis=now_millis)
            if loss.acknowledged_millis is None and loss.extent in seen
            else loss
            for loss in self.losses
        )
        acknowledged = min(self.acknowledged + marked, _MAX_INT)
        return _cut(LossLog(losses, self.unlisted - unlisted, acknowledged, now_millis))


def _cut(log: LossLog) -> LossLog:
    """Remove losses that exceed the limits: first acknowledged ones, then the oldest."""
    while len(log.losses) > MAX_LOSSES or len(losses_text(log)) > MAX_TEXT:
        oldest = next((loss for loss in log.losses if loss.acknowledged_millis is not None), None)
        gone = oldest or log.losses[0]
        log = replace(
            log,
            losses=tuple(loss for loss in log.losses if loss is not gone),
            unlisted=min(log.unlisted + (oldest is None), _MAX_INT),
        )
    return log


@dataclass(frozen=True, slots=True)
class LossRecord:
    """A record that was read. A conditional write compares `text`; None: there is no record."""

    log: LossLog
    text: str | None


def losses_text(log: LossLog) -> str:
    """Return the value of the attribute, without members that are None."""
    fields = msgspec.to_builtins(log)
    fields["losses"] = [
        {name: value for name, value in loss.items() if value is not None}
        for loss in fields["losses"]
    ]
    return msgspec.json.encode(fields, order="deterministic").decode()


def losses_from_text(text: str) -> LossRecord:
    """Parse the value of the attribute.

    Raises:
        UnreadableRowError: The value is not a record of losses.
    """
    advice = "check it and remove it: the workers' logs have the losses as records_lost"
    return LossRecord(record_of(text, LossLog, "kclpLosses", MAX_TEXT, advice), text)


def time_text(millis: int | None) -> str:
    """Return a time in UTC with seconds; empty for None."""
    if millis is None:
        return ""
    try:
        return datetime.fromtimestamp(millis / 1000, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):  # outside the calendar
        return f"{millis} ms"
