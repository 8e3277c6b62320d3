"""The forms in which users write `streams=`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import get_args

from kcl_pipeline.arguments import check_options, check_text, checked_arguments
from kcl_pipeline.config import InitialPosition, StreamSettings
from kcl_pipeline.config.model import (
    CONSUMER_FORM,
    STREAM_FORMS,
    is_stream,
    names_stream,
    stream_of_consumer,
)
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.settings_errors import nearest, wrong


@checked_arguments
@dataclass(frozen=True, slots=True)
class StreamConfig:
    """A stream with an initial position or a fan-out consumer of its own.

    Example:
        >>> from kcl_pipeline import StreamConfig
        >>> stream = StreamConfig("orders", initial_position="LATEST")

    Raises:
        SettingsError: A value is wrong, or the values contradict each other.
    """

    name_or_arn: str
    """The stream. Write the ARN for a stream of another account."""
    initial_position: InitialPosition | None = None
    """Where new leases of this stream begin. None: `shard_sync.initial_position_in_stream`."""
    timestamp: datetime | None = None
    """Required with AT_TIMESTAMP; with a time zone."""
    consumer_arn: str | None = None
    """ARN of a registered consumer. None: a consumer is registered if fan-out is used."""

    def __post_init__(self) -> None:
        advice = f"Write {STREAM_FORMS}"
        check_text("StreamConfig name_or_arn", self.name_or_arn, advice)
        if not is_stream(self.name_or_arn):
            raise wrong("StreamConfig name_or_arn", self.name_or_arn, "is not a stream", advice)
        self._check_position()
        self._check_consumer()

    def _check_position(self) -> None:
        known = get_args(InitialPosition)
        position, time = self.initial_position, self.timestamp
        if position is not None and position not in known:
            close = nearest(str(position), known)
            advice = f"Did you mean {close!r}?" if close else f"Write one of {', '.join(known)}."
            raise SettingsError(
                f"StreamConfig initial_position={position!r} is not one of its values. {advice}"
            )
        if time is not None and (not isinstance(time, datetime) or time.tzinfo is None):
            raise wrong(
                "StreamConfig timestamp",
                time,
                "is not a time with a time zone",
                "Write datetime(2026, 1, 31, 12, tzinfo=UTC)",
            )
        if (position == "AT_TIMESTAMP") != (time is not None):
            raise SettingsError(
                f"StreamConfig timestamp={time} does not fit initial_position={position!r}. Write "
                "a time and initial_position='AT_TIMESTAMP', or omit the time."
            )

    def _check_consumer(self) -> None:
        arn = self.consumer_arn
        if arn is None:
            return
        advice = f"Write {CONSUMER_FORM}"
        check_text("StreamConfig consumer_arn", arn, advice)
        of_stream = stream_of_consumer(arn)
        if of_stream is None:
            raise wrong("StreamConfig consumer_arn", arn, "is not the ARN of a consumer", advice)
        if not names_stream(self.name_or_arn, of_stream):
            problem = f"is a consumer of another stream than {self.name_or_arn!r}"
            raise wrong("StreamConfig consumer_arn", arn, problem, advice)

    def settings(self) -> StreamSettings:
        """Return the values as settings."""
        return StreamSettings(
            initial_position_in_stream=self.initial_position,
            initial_timestamp=self.timestamp,
            consumer_arn=self.consumer_arn,
        )


@checked_arguments
@dataclass(frozen=True, slots=True)
class StreamSelector:
    """Selects the streams of the account and region by name and tags. The leader asks each minute.

    Example:
        >>> from kcl_pipeline import StreamSelector
        >>> streams = StreamSelector(prefix="orders-", tags={"team": "shop"})

    Raises:
        SettingsError: A value is wrong, or neither is given.
    """

    prefix: str = ""
    """The names begin with this."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Every stream has these tags. Changed tags are noticed within ten minutes."""

    def __post_init__(self) -> None:
        if not isinstance(self.prefix, str) or (self.prefix and not is_stream(self.prefix)):
            raise wrong(
                "StreamSelector prefix",
                self.prefix,
                "is not a prefix",
                "Write the first characters of stream names, such as 'orders-'",
            )
        check_options("StreamSelector tags", self.tags, "{'team': 'orders'}")
        if not self.prefix and not self.tags:
            raise SettingsError(
                "StreamSelector has neither prefix nor tags and would select every stream. Write "
                "StreamSelector(prefix='orders-') or StreamSelector(tags={'team': 'orders'})."
            )


StreamForms = Sequence[str | StreamConfig] | StreamSelector | Callable[[], Iterable[str]]
"""What `streams=` takes."""


def stream_settings(streams: StreamForms) -> dict[str, object]:
    """Return the settings that `streams=` writes."""
    if isinstance(streams, StreamSelector) or callable(streams):
        return {"selects_streams": True, "streams": ()}
    names = tuple(s.name_or_arn if isinstance(s, StreamConfig) else s for s in streams)
    configs = {s.name_or_arn: s.settings() for s in streams if isinstance(s, StreamConfig)}
    return {"streams": names, "stream_settings": configs}
