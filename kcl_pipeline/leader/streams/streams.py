"""The streams that a leader creates leases for, and the waits after their errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Final, TypeGuard

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings, ShardSyncSettings
from kcl_pipeline.errors import (
    STREAM_ERRORS,
    AwsError,
    NotFoundError,
    StreamReplacedError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.events import EventSink, StreamUnavailable
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leader.lock import NotLeadingError
from kcl_pipeline.leader.phase import STREAM_OPERATIONS
from kcl_pipeline.leader.streams.selection import StreamSelection
from kcl_pipeline.leases.application.identity import ApplicationIdentity
from kcl_pipeline.leases.application.recorded_stream import (
    AccountAndName,
    InitialPositions,
    RecordedStream,
)
from kcl_pipeline.leases.state.worker_status import UnavailableStream
from kcl_pipeline.shards import StreamId

LOOK_SECONDS: Final = 5.0
"""How often one stream is described, to notice that it was created again."""

LOOKS_PER_SECOND: Final = 4.0
"""Limit for all streams. DescribeStreamSummary is limited to 20 calls per second and account."""

FIRST_WAIT_SECONDS: Final = 5.0
LONGEST_WAIT_SECONDS: Final = 30.0
REPORT_SECONDS: Final = 60.0


@dataclass(slots=True)
class _Known:
    stream: StreamId
    due: float = 0.0
    wait_seconds: float = 0.0


@dataclass(slots=True)
class _Wait:
    error: AwsError
    seconds: float
    due: float
    reported_at: float


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
        self._known: dict[str, _Known] = {}
        self._waits: dict[str, _Wait] = {}
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
        return self._settings.is_multi_stream and any(
            name in self._known for name in self.configured()
        )

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
        known = (self._known[name].stream for name in self.configured() if name in self._known)
        configured = {(stream.account, stream.name) for stream in known}
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
        unresolved = (RecordedStream(one) for one in self.configured() if one not in self._known)
        found = (one.account_and_name for one in unresolved)
        return {(own if account is None else account, name) for account, name in found}

    def _own_account(self) -> str | None:
        resolved = (one.stream for name, one in self._known.items() if not name.startswith("arn:"))
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
        wait = self._waits.get(name_or_arn)
        return wait is not None and isinstance(wait.error, NotFoundError)

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
            known = self._known.get(name)
            if known is not None:
                arns |= {known.stream.arn, known.stream.name}
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
        names = set(self.names())
        for cache in (self._known, self._waits):
            for name in cache.keys() - names:  # a selection may name thousands in its life
                del cache[name]

    def look(self, name_or_arn: str) -> StreamId:
        """Return the stream that has a name now. It is requested from the service now and then.

        Raises:
            AwsError: The call failed, for example because the stream does not exist. After an
                error of this stream, no call is made for some seconds.
        """
        now = self._clock.monotonic()
        wait = self._waits.get(name_or_arn)
        if wait is not None and now < wait.due:
            error = wait.error
            raise type(error)(str(error), code=error.code, operation=error.operation)
        known = self._known.get(name_or_arn)
        if known is not None and now < known.due:
            return known.stream
        try:
            found = self._kinesis.resolve_stream(
                name_or_arn, multi_stream=self._settings.is_multi_stream
            )
        except (ThrottledError, UnavailableError) as failure:
            if known is None:
                self._note_failure(name_or_arn, failure)
                raise
            # From the end of the call, which has waited between its attempts
            known.wait_seconds = min(
                max(2 * known.wait_seconds, self._look_seconds()), LONGEST_WAIT_SECONDS
            )
            known.due = self._clock.monotonic() + self._spread(known.wait_seconds)
            return known.stream
        except STREAM_ERRORS as failure:
            self._note_failure(name_or_arn, failure)
            raise
        if wait is not None and wait.error.operation == "DescribeStreamSummary":
            del self._waits[name_or_arn]
        # Creation times only grow. A smaller one is a response about a former stream of this name.
        if known is None or (found.created_millis or 0) >= (known.stream.created_millis or 0):
            self._known[name_or_arn] = known = _Known(found)
        known.wait_seconds = 0.0
        known.due = self._clock.monotonic() + self._look_seconds()
        return known.stream

    def _spread(self, seconds: float) -> float:
        return seconds * self._rng.uniform(0.5, 1.0)

    def _look_seconds(self) -> float:
        return max(LOOK_SECONDS, len(self._known) / LOOKS_PER_SECOND)

    def _note_failure(self, name: str, error: AwsError) -> None:
        now = self._clock.monotonic()
        before = self._waits.get(name)
        seconds = (
            FIRST_WAIT_SECONDS if before is None else min(2 * before.seconds, LONGEST_WAIT_SECONDS)
        )
        reported_at = before.reported_at if before is not None else now - REPORT_SECONDS
        if now - reported_at >= REPORT_SECONDS:
            reported_at = now
            self._events(StreamUnavailable(self._reporter, name, str(error)))
        is_throttled = isinstance(error, ThrottledError | UnavailableError)
        due = now + (self._spread(seconds) if is_throttled else seconds)
        self._waits[name] = _Wait(error, seconds, due, reported_at)

    def forget(self) -> None:
        """Forget all streams. They are resolved again when needed."""
        self._known.clear()

    def known(self) -> tuple[StreamId, ...]:
        """Return the streams that are resolved, in the order of `names`."""
        streams = (self._known[name].stream for name in self.names() if name in self._known)
        return tuple(
            found for stream in streams if (found := self._as_recorded(stream)) is not None
        )

    def unavailable(self) -> tuple[UnavailableStream, ...]:
        """Return the streams whose last attempt failed, in the order of `names`."""
        waits = ((name, self._waits.get(name)) for name in self.names())
        return tuple(
            UnavailableStream(name, str(wait.error)) for name, wait in waits if wait is not None
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
                self._waits.pop(name, None)


def _is_of_stream(error: Exception) -> TypeGuard[AwsError]:
    """Return whether a call about the stream failed, and not one about a table."""
    return isinstance(error, STREAM_ERRORS) and error.operation in STREAM_OPERATIONS
