"""The base of all events, and what receives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""


EventSink = Callable[[Event], None]


def ignore_events(event: Event) -> None:
    """Drop the event."""
