"""Ask at run time which streams the application reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kcl_pipeline.background import Joinable, Spawn, spawn_thread
from kcl_pipeline.clock import Clock
from kcl_pipeline.config.model import STREAM_FORMS, is_stream
from kcl_pipeline.errors import KclError, SettingsError
from kcl_pipeline.events import AwsTrouble, EventSink
from kcl_pipeline.leases.application.identity import MAX_TEXT

ASK_SECONDS: Final = 60.0
MAX_STREAMS: Final = 10_000
_CHARACTERS: Final = 20
"""What the record of the application has of a stream, besides its name."""
_SPARE: Final = 50_000
"""Characters of the record for the sink, and for former streams that still have leases."""

SelectStreams = Callable[[], Iterable[str]]
"""Returns the names or ARNs of the streams that the application reads now."""


def selected_streams(select: SelectStreams) -> tuple[str, ...]:
    """Return a checked answer, without duplicates.

    Raises:
        SettingsError: The answer cannot be used.
        Exception: Any error of `select`.
    """
    answer = select()
    if isinstance(answer, str) or not isinstance(answer, Iterable):
        raise SettingsError(f"the selection returned {type(answer).__name__}, not a list")
    names = tuple(dict.fromkeys(answer))
    for name in names:
        if not isinstance(name, str) or not is_stream(name):
            raise SettingsError(f"the selection returned {name!r:.200}. Write {STREAM_FORMS}")
    if len(names) > MAX_STREAMS:
        raise SettingsError(f"the selection returned {len(names)} streams, above {MAX_STREAMS}")
    characters = sum(map(len, names)) + _CHARACTERS * len(names)
    if characters > MAX_TEXT - _SPARE:
        raise SettingsError(
            f"the selection returned {len(names)} streams, more than the record of the application "
            f"holds: {characters} of {MAX_TEXT - _SPARE} characters. Select fewer streams, and "
            "write another application for the rest"
        )
    return names


class StreamSelection:
    """The last usable answer. A failed or empty answer changes nothing.

    Every question runs in a thread of its own, so that a slow answer does not delay a cycle. There
    is at most one such thread.

    Args:
        select: Returns the streams.
        clock: Measures the time between two questions.
        events: Receives `AwsTrouble` for every failed answer, in the thread of the question.
        spawn: Starts the thread of a question.
    """

    def __init__(
        self,
        select: SelectStreams,
        clock: Clock,
        events: EventSink,
        spawn: Spawn = spawn_thread,
    ) -> None:
        self._select = select
        self._clock = clock
        self._events = events
        self._spawn = spawn
        self._due = clock.monotonic()
        self._asking: Joinable | None = None
        self._answer: tuple[tuple[str, ...], int] = ((), 0)

    @property
    def answer(self) -> tuple[tuple[str, ...], int]:
        """The streams, and the number of usable answers so far."""
        return self._answer

    def poll(self) -> None:
        """Ask again if it is time. Does not wait for the answer."""
        now = self._clock.monotonic()
        is_asking = self._asking is not None and self._asking.is_alive()
        if is_asking or now < self._due:
            return
        self._due = now + ASK_SECONDS
        self._asking = self._spawn("select-streams", self._ask)

    def _ask(self) -> None:
        try:
            names = selected_streams(self._select)
        except Exception as error:  # noqa: BLE001 (the function may be the user's)
            text = str(error) if isinstance(error, KclError) else f"{type(error).__name__}: {error}"
            self._report(text)
            return
        if not names and self._answer[0]:
            self._report("the answer is empty")
            return
        self._answer = (names, self._answer[1] + 1)

    def _report(self, text: str) -> None:
        self._events(AwsTrouble("selection of the streams; the last ones are kept", text))
