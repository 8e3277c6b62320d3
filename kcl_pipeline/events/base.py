"""The base of all events, and what receives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events.

    Example:
        >>> from kcl_pipeline import Event, LeaseLost
        >>> lost: list[str] = []
        >>> def watch(event: Event) -> None:
        ...     if isinstance(event, LeaseLost):
        ...         lost.append(event.lease_key)
        >>> watch(LeaseLost("w-1", "shardId-000000000000", "it was not renewed in time"))
        >>> lost
        ['shardId-000000000000']
    """


EventSink = Callable[[Event], None]
"""What receives events.

Example:
    >>> from kcl_pipeline import Event, EventSink
    >>> def show(event: Event) -> None:
    ...     print(type(event).__name__)
    >>> sink: EventSink = show
"""


def ignore_events(event: Event) -> None:
    """Drop the event.

    Example:
        >>> from kcl_pipeline import ignore_events
        >>> worker = orders.build_worker("w-1", events=ignore_events)  # doctest: +SKIP
    """
