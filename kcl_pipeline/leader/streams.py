"""The streams that an application reads: which they are, and what they are now.

`StreamSelection` asks a function of the user for them. `Streams` has those of the settings or of
the selection, and those that other workers have recorded, and describes each of them now and then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Final, TypeGuard

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings, ShardSyncSettings
from kcl_pipeline.config.model import STREAM_FORMS, is_stream
from kcl_pipeline.errors import (
    STREAM_ERRORS,
    STREAM_OPERATIONS,
    AwsError,
    NotFoundError,
    SettingsError,
    StreamReplacedError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.events import AwsTrouble, EventSink, StreamUnavailable
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leader.lock import NotLeadingError
from kcl_pipeline.leases.application import (
    MAX_IDENTITY,
    AccountAndName,
    ApplicationIdentity,
    InitialPositions,
    RecordedStream,
)
from kcl_pipeline.shards import StreamId
from kcl_pipeline.threads import Joinable, Spawn, spawn_thread
from kcl_pipeline.unexpected import described
from kcl_pipeline.worker_status import UnavailableStream

ASK_SECONDS: Final = 60.0
MAX_STREAMS: Final = 10_000
_CHARACTERS: Final = 20
"""What the record of the application has of a stream, besides its name."""
_SPARE: Final = 50_000
"""Characters of the record for the sink, and for former streams that still have leases."""

LOOK_SECONDS: Final = 5.0
"""How often one stream is described, to notice that it was created again."""
LOOKS_PER_SECOND: Final = 4.0
"""Limit for all streams. DescribeStreamSummary is limited to 20 calls per second and account."""
FIRST_WAIT_SECONDS: Final = 5.0
LONGEST_WAIT_SECONDS: Final = 30.0
REPORT_SECONDS: Final = 60.0

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
    if characters > MAX_IDENTITY - _SPARE:
        raise SettingsError(
            f"the selection returned {len(names)} streams, more than the record of the application "
            f"holds: {characters} of {MAX_IDENTITY - _SPARE} characters. Select fewer streams, and "
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
            self._report(described(error, "selection of the streams"))
            return
        if not names and self._answer[0]:
            self._report("the answer is empty")
            return
        self._answer = (names, self._answer[1] + 1)

    def _report(self, text: str) -> None:
        self._events(AwsTrouble("selection of the streams; the last ones are kept", text))


@dataclass(slots=True)
class _Description:
    """What is known of the stream that has a name.

    Attributes:
        stream: The last description. None: there was none.
        due: When it is described again.
        error: Why it cannot be read now. None: it can.
        error_due: When the next attempt is made after the error.
        wait_seconds: The last wait after an error, or after a throttled description.
        reported_at: When the error was last reported.
    """

    stream: StreamId | None = None
    due: float = -math.inf
    error: AwsError | None = None
    error_due: float = -math.inf
    wait_seconds: float = 0.0
    reported_at: float = -math.inf


class Streams:
    """The streams in the settings of this leader, and those that other workers have recorded.

    During a deploy, the leader may still have the former list. Therefore, a stream that a new
    worker has recorded gets leases, too. A stream that is missing or forbidden is tried again after
    a wait.

    Args:
        settings: All settings.
        kinesis: Describes streams.
        clock: Measures the waits.
        events: Receives `StreamUnavailable`, once a minute for each stream.
        reporter: Owner name of the leader.
        selection: The streams of the application, if the settings do not name them.
        rng: Spreads the waits of processes that were throttled together.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        kinesis: KinesisClient,
        clock: Clock,
        events: EventSink,
        reporter: str,
        selection: StreamSelection | None = None,
        *,
        rng: Random,
    ) -> None:
        self._rng = rng
        self._selection = selection
        self._settings = settings
        self._kinesis = kinesis
        self._clock = clock
        self._events = events
        self._reporter = reporter
        self._descriptions: dict[str, _Description] = {}
        self._recorded: tuple[RecordedStream, ...] = ()
        self._adopted: tuple[str, ...] = ()
        self._positions = InitialPositions(settings)

    def note_record(self, identity: ApplicationIdentity) -> None:
        """Note the recorded streams, which the next phases read in addition to the settings'."""
        self._recorded = identity.streams
        self._positions.note_record(identity.streams)

    def poll(self) -> None:
        """Ask for the selected streams, if it is time."""
        if self._selection is not None:
            self._selection.poll()

    def configured(self) -> tuple[str, ...]:
        """Return the names or ARNs of the settings, or of the last selection."""
        return self._settings.streams if self._selection is None else self._selection.answer[0]

    def names(self) -> tuple[str, ...]:
        """Return names or ARNs: the configured ones, then those of other recorded streams."""
        own = self.configured()
        if not self._settings.is_multi_stream:
            return own
        named = self._named()
        recorded = (one.arn for one in self._recorded if not named(one))
        return (*own, *recorded, *(arn for arn in self._adopted if not self._is_gone(arn)))

    def are_known(self) -> bool:
        """Whether there are several streams, and a configured one was resolved."""
        return self._settings.is_multi_stream and any(map(self._described, self.configured()))

    def _described(self, name: str) -> StreamId | None:
        """Return the last description of a stream. None: it is not resolved."""
        known = self._descriptions.get(name)
        return None if known is None else known.stream

    @property
    def answers(self) -> int | None:
        """Number of usable answers of the selection. None: the settings name the streams."""
        return None if self._selection is None else self._selection.answer[1]

    def former(self) -> tuple[RecordedStream, ...]:
        """Return the recorded streams that are not configured, and cannot be."""
        named = self._named()
        others = tuple(one for one in self._recorded if not named(one))
        found = self.not_configured({one.account_and_name for one in others})
        return tuple(one for one in others if one.account_and_name in found)

    def identities(self) -> set[AccountAndName]:
        """Return account and name of the configured and of the recorded streams."""
        known = map(self._described, self.configured())
        configured = {(stream.account, stream.name) for stream in known if stream is not None}
        return configured | {one.account_and_name for one in self._recorded}

    def not_configured(self, identities: set[AccountAndName]) -> set[AccountAndName]:
        """Return those of `identities` that no unresolved configured stream can turn out to be."""
        unresolved = self._unresolved()
        return {
            (account, name)
            for account, name in identities
            if not {(account, name), (None, name)} & unresolved
        }

    def _unresolved(self) -> set[AccountAndName]:
        """Return the configured streams that are not resolved yet.

        A name without an account is one of the own account. That is unknown until a configured name
        is resolved.
        """
        own = self._own_account()
        unresolved = (
            RecordedStream(one) for one in self.configured() if self._described(one) is None
        )
        found = (one.account_and_name for one in unresolved)
        return {(own if account is None else account, name) for account, name in found}

    def _own_account(self) -> str | None:
        names = (name for name in self._descriptions if not name.startswith("arn:"))
        resolved = (stream for name in names if (stream := self._described(name)) is not None)
        return next((stream.account for stream in resolved if stream.account is not None), None)

    def adopt(self, orphans: Iterable[AccountAndName]) -> None:
        """Set the streams that have leases, but are neither configured nor recorded."""
        arn = next((one.arn for one in self._recorded), None)
        if arn is not None:
            start = ":".join(arn.split(":")[:4])
            arns = (f"{start}:{account}:stream/{name}" for account, name in orphans)
            self._adopted = tuple(sorted(arns))

    def does_not_exist(self, identity: AccountAndName) -> bool:
        """Return whether the last attempt to describe a recorded stream did not find it."""
        return any(
            self._is_gone(one.arn) for one in self._recorded if one.account_and_name == identity
        )

    def _is_gone(self, name_or_arn: str) -> bool:
        known = self._descriptions.get(name_or_arn)
        return known is not None and isinstance(known.error, NotFoundError)

    def shard_sync_of(self, stream: StreamId) -> ShardSyncSettings:
        """Return the settings of shard sync with the initial position of this stream."""
        if stream.arn in self._adopted:
            return self._settings.shard_sync.of_orphan()
        return self._positions.of(stream)

    def _named(self) -> Callable[[RecordedStream], bool]:
        """Return a function that returns whether a recorded stream is certainly configured.

        An unresolved name does not stand for a stream of another account. If the own account is
        unknown, the recorded streams of that name are read, too.
        """
        configured = self.configured()
        arns = set[str | None](configured)
        for name in configured:
            stream = self._described(name)
            if stream is not None:
                arns |= {stream.arn, stream.name}
        unresolved = {one for one in self._unresolved() if one[0] is not None}
        return lambda recorded: recorded.arn in arns or recorded.account_and_name in unresolved

    def resolve(self, name_or_arn: str) -> StreamId:
        """Return the identifier of a stream whose leases may be written.

        Raises:
            StreamReplacedError: A single stream was created again, and this is not recorded yet.
            AwsError: See `look`.
        """
        stream = self.look(name_or_arn)
        recorded = self._as_recorded(stream)
        if recorded is None:
            raise StreamReplacedError(
                f"the stream {stream.name} was deleted and created again; the next cycle begins "
                "the new one",
                code="StreamReplaced",
                operation="DescribeStreamSummary",
            )
        return recorded

    def _as_recorded(self, stream: StreamId) -> StreamId | None:
        """Return the stream with `recreated_millis`; None if it is not the recorded one."""
        if self._settings.is_multi_stream or not self._recorded:
            return stream
        return self._recorded[0].as_recorded(stream)

    def refresh(self) -> None:
        """Forget the streams that are not read any more."""
        # A selection may name thousands in its life
        for name in self._descriptions.keys() - set(self.names()):
            del self._descriptions[name]

    def look(self, name_or_arn: str) -> StreamId:
        """Return the stream that has a name now. It is requested from the service now and then.

        Raises:
            AwsError: The call failed, for example because the stream does not exist. After an
                error of this stream, no call is made for some seconds.
        """
        now = self._clock.monotonic()
        known = self._descriptions.setdefault(name_or_arn, _Description())
        error = known.error
        if error is not None and now < known.error_due:
            raise type(error)(str(error), code=error.code, operation=error.operation)
        if known.stream is not None and now < known.due:
            return known.stream
        try:
            found = self._kinesis.resolve_stream(
                name_or_arn, multi_stream=self._settings.is_multi_stream
            )
        except (ThrottledError, UnavailableError) as failure:
            if known.stream is None:
                self._note_failure(name_or_arn, failure)
                raise
            # The stream was there a moment ago: its leases are still kept complete
            known.due = self._lengthen(known, is_spread=True)
            return known.stream
        except STREAM_ERRORS as failure:
            self._note_failure(name_or_arn, failure)
            raise
        if error is None or error.operation == "DescribeStreamSummary":
            self._note_success(known)
        # Creation times only grow. A smaller one is a response about a former stream of this name.
        former = known.stream
        if former is None or (found.created_millis or 0) >= (former.created_millis or 0):
            known.stream = former = found
        known.due = self._clock.monotonic() + self._look_seconds()
        return former

    def _look_seconds(self) -> float:
        return max(LOOK_SECONDS, len(self._descriptions) / LOOKS_PER_SECOND)

    def _lengthen(self, known: _Description, *, is_spread: bool) -> float:
        """Double the wait of a stream; return its end.

        It begins at the end of the call, which has waited between its attempts. The limit of calls
        is one of the account: processes that were throttled together must not come back together.
        """
        seconds = min(max(2 * known.wait_seconds, FIRST_WAIT_SECONDS), LONGEST_WAIT_SECONDS)
        known.wait_seconds = seconds
        spread = self._rng.uniform(0.5, 1.0) if is_spread else 1.0
        return self._clock.monotonic() + spread * seconds

    def _note_failure(self, name: str, error: AwsError) -> None:
        now, known = self._clock.monotonic(), self._descriptions[name]
        if now - known.reported_at >= REPORT_SECONDS:
            known.reported_at = now
            self._events(StreamUnavailable(self._reporter, name, str(error)))
        is_throttled = isinstance(error, ThrottledError | UnavailableError)
        known.error, known.error_due = error, self._lengthen(known, is_spread=is_throttled)

    def _note_success(self, known: _Description) -> None:
        known.error, known.wait_seconds, known.reported_at = None, 0.0, -math.inf

    def forget(self) -> None:
        """Forget all streams. They are resolved again when needed."""
        for known in self._descriptions.values():
            known.stream = None

    def known(self) -> tuple[StreamId, ...]:
        """Return the streams that are resolved, in the order of `names`."""
        streams = (stream for stream in map(self._described, self.names()) if stream is not None)
        return tuple(
            found for stream in streams if (found := self._as_recorded(stream)) is not None
        )

    def unavailable(self) -> tuple[UnavailableStream, ...]:
        """Return the streams whose last attempt failed, in the order of `names`."""
        known = ((name, self._descriptions.get(name)) for name in self.names())
        return tuple(
            UnavailableStream(name, str(one.error))
            for name, one in known
            if one is not None and one.error is not None
        )

    def for_each(self, work: Callable[[StreamId], None], errors: list[Exception]) -> None:
        """Call `work` for every stream, and add errors to `errors`."""
        for name in self.names():
            is_resolved = False
            try:
                stream = self.resolve(name)
                is_resolved = True
                work(stream)
            except NotLeadingError:
                raise
            except Exception as error:  # noqa: BLE001 (the cycle counts and reports it)
                errors.append(error)
                if is_resolved and _is_of_stream(error):
                    self._note_failure(name, error)
            else:
                known = self._descriptions[name]
                if known.error is not None:
                    self._note_success(known)


def _is_of_stream(error: Exception) -> TypeGuard[AwsError]:
    """Return whether a call about the stream failed, and not one about a table."""
    return isinstance(error, STREAM_ERRORS) and error.operation in STREAM_OPERATIONS
