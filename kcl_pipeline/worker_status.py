"""The status of a worker: one value with its counters since its start and its gauges now.

It is stored as one attribute of ours in the worker metrics row: a small JSON document, which Java
readers ignore. Every report writes it, so the command line and the leader see a worker whose
processing thread does not respond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from operator import add, lt, sub
from typing import Annotated, Final

import msgspec
from msgspec.structs import astuple, replace

from kcl_pipeline.text import printable

MAX_PAUSED: Final = 20
"""Largest number of paused leases in a row (our own limit).

`WorkerStatus.paused_leases` is the total number.
"""
MAX_STALLED: Final = 10
"""Largest number of stalled leases in a row (our own limit): those that stand still longest."""
MAX_LAGS: Final = 20
"""Largest number of leases with their lag in a row (our own limit): those with the largest lag."""
SMALL_LAGS: Final = 10
"""How many lags up to `SMALL_LAG_MILLIS` a row lists, so that it has less than 1 KB (one WCU)."""
SMALL_LAG_MILLIS: Final = 10_000
MAX_UNAVAILABLE: Final = 20
"""Largest number of unavailable streams in a row (our own limit)."""
MAX_STREAMS: Final = 100
"""Largest number of streams with their lag in a row (our own limit): those with the largest lag."""
MAX_REASON_CHARACTERS: Final = 200
MAX_VERSION_CHARACTERS: Final = 64
_MAX_CHARACTERS: Final = 64 * 1024
_MAX_KEY: Final = 2048
_MAX_STEP: Final = 40
_MAX_COUNT: Final = 2**31 - 1
_MAX_LARGE: Final = 2**63 - 1

_Key = Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_KEY)]
_Reason = Annotated[str, msgspec.Meta(max_length=2 * MAX_REASON_CHARACTERS)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=_MAX_COUNT)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]
_Large = Annotated[int, msgspec.Meta(ge=0, le=_MAX_LARGE)]
"""Milliseconds, or a counter that only grows."""


class PausedLease(msgspec.Struct, frozen=True, rename="camel"):
    """A lease whose shard has been paused for `seconds` (see `events.ShardPaused`)."""

    lease_key: _Key
    reason: _Reason
    seconds: _Seconds


class StalledLease(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A held lease whose shard has made no progress (see `events.ShardStalled`).

    Attributes:
        lease_key: The lease.
        step: What it waits for (a value of `events.StallStep`).
        seconds: Time since the last progress.
        error: The error of the last attempt. None: there was none.
    """

    lease_key: _Key
    step: Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_STEP)]
    seconds: _Seconds
    error: _Reason | None = None


class LeaseLag(msgspec.Struct, frozen=True, rename="camel"):
    """The age of the oldest record of a lease that is not committed, in milliseconds."""

    lease_key: _Key
    millis: _Large


class StreamLag(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The lag of one stream in one worker.

    Attributes:
        stream: The stream in the lease keys (`account:name:epoch`).
        millis: Age of its oldest record that is not committed. None: unknown.
        unknown: Number of its leases whose lag is unknown.
    """

    stream: _Key
    millis: _Large | None = None
    unknown: _Count = 0


class UnavailableStream(msgspec.Struct, frozen=True, rename="camel"):
    """A stream that is missing or forbidden, so that its shards cannot be listed or read.

    Attributes:
        stream: Name or ARN, as in the settings or in the recorded identity.
        reason: The error.
    """

    stream: _Key
    reason: _Reason


class HungState(msgspec.Struct, frozen=True, rename="camel"):
    """The processing thread of a worker has made no progress while records wait.

    Attributes:
        step: What it does (a value of `events.HangStep`).
        seconds: Time since the step began.
        leases: Number of held leases that may have records that are not committed.
    """

    step: Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_STEP)]
    seconds: _Seconds
    leases: _Count = 0


class WorkerTotals(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """What a worker has done since it started. Totals can be added and subtracted.

    The counters only grow while the process lives.

    Attributes:
        seconds: Since the worker started, by its own clock.
        records: Records in committed batches, including dead letters.
        bytes: Payload that was read for them.
        rows: Rows written.
        batches: Batches committed.
        dead_letters: Records that were written as dead letters, or skipped.
        refused_batches: Batches that were not committed with all shards.
        handoffs: Leases that were handed over to another worker.

    Example:
        >>> from kcl_pipeline import WorkerTotals
        >>> (WorkerTotals(60.0, records=7) - WorkerTotals(45.0, records=5)).records
        2
    """

    seconds: _Seconds = 0.0
    records: _Large = 0
    bytes: _Large = 0
    rows: _Large = 0
    batches: _Large = 0
    dead_letters: _Large = 0
    refused_batches: _Large = 0
    handoffs: _Large = 0

    def __add__(self, other: WorkerTotals) -> WorkerTotals:
        return WorkerTotals(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: WorkerTotals) -> WorkerTotals:
        return WorkerTotals(*map(sub, astuple(self), astuple(other)))

    def is_below(self, other: WorkerTotals) -> bool:
        """Whether any counter is smaller than in `other`: it is of an earlier process."""
        return any(map(lt, astuple(self)[1:], astuple(other)[1:]))


class WorkerStatus(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The status of a worker: its counters since its start, and its gauges now.

    The worker metrics row stores it (`status_text`), with the first leases of each list only. The
    metrics show its gauges. The progress of a period is the difference of two (`since`), and the
    summary of a worker has the last one.

    Attributes:
        lag_millis: Age of its oldest record that is not committed. None: unknown.
        unknown_lags: Number of leases whose lag is unknown.
        paused: The paused leases.
        paused_leases: Number of paused leases.
        lags: The leases with a known lag, largest first. A row has at most `MAX_LAGS`, and at most
            `SMALL_LAGS` if the others are small.
        failed_batches: Batches in a row that the sink refused.
        failure: Why the sink refused the last batch. None: it accepted it.
        unavailable: Streams that the leader in this worker could not use in its last cycle; at
            most `MAX_UNAVAILABLE`. None: the worker does not lead.
        totals: What it has done since its start, or in a period.
        version: Version of this package in the worker. None: unknown.
        more_lags: Number of leases with a known lag that are not in `lags`.
        more_lags_millis: The median of their lags. None: `more_lags` is 0.
        streams: The lag by stream, with several streams; at most `MAX_STREAMS`.
        hung: Set while the worker is hung. None: it is not.
        stalled: The leases that make no progress, those that stand still longest first.
        stalled_leases: Number of leases that make no progress.
        read_leases: Number of held leases that are not finished and whose shard was read since
            this worker took them, or waits for its parents.
        last_batch_seconds: Age of the last committed batch. None: no batch yet.
        commit_millis_p99: Time to write and commit a batch, over the last five minutes.
        put_to_commit_millis_p99: Time from the arrival of a record in Kinesis to its commit, over
            the last five minutes.
        table_version: Version of the table after the last batch.
        memory_bytes: Bytes of records and results in the worker. None: they are not counted. A row
            has neither them nor their limit.
        memory_limit_bytes: Their limit (`worker.record_memory_max_bytes`).
        is_drain: Whether the worker ends by itself when it has read what the streams had at its
            start.
        positions: Newest committed position by lease, as "sequence number" or "sequence/sub". A row
            has none: they are in the lease rows.

    Example:
        >>> from kcl_pipeline import WorkerStatus
        >>> def show(status: WorkerStatus) -> None:
        ...     print(status.totals.records, status.lag_millis)
        >>> worker.run(stop, on_progress=show)  # doctest: +SKIP
    """

    lag_millis: _Large | None = None
    unknown_lags: _Count = 0
    paused: Annotated[tuple[PausedLease, ...], msgspec.Meta(max_length=MAX_PAUSED)] = ()
    paused_leases: _Count = 0
    lags: Annotated[tuple[LeaseLag, ...], msgspec.Meta(max_length=MAX_LAGS)] = ()
    failed_batches: _Count = 0
    failure: _Reason | None = None
    unavailable: (
        Annotated[tuple[UnavailableStream, ...], msgspec.Meta(max_length=MAX_UNAVAILABLE)] | None
    ) = None
    totals: WorkerTotals = WorkerTotals()
    version: Annotated[str, msgspec.Meta(max_length=MAX_VERSION_CHARACTERS)] | None = None
    more_lags: _Count = 0
    more_lags_millis: _Large | None = None
    streams: Annotated[tuple[StreamLag, ...], msgspec.Meta(max_length=MAX_STREAMS)] = ()
    hung: HungState | None = None
    stalled: Annotated[tuple[StalledLease, ...], msgspec.Meta(max_length=MAX_STALLED)] = ()
    stalled_leases: _Count = 0
    read_leases: _Count = 0
    last_batch_seconds: _Seconds | None = None
    commit_millis_p99: _Large | None = None
    put_to_commit_millis_p99: _Large | None = None
    table_version: _Large | None = None
    memory_bytes: _Large | None = None
    memory_limit_bytes: _Large | None = None
    is_drain: bool = False
    positions: Mapping[str, str] = {}

    def since(self, earlier: WorkerStatus) -> WorkerStatus:
        """Return the status with the totals of the time after `earlier`: the progress."""
        return replace(self, totals=self.totals - earlier.totals)


def lags_by_stream(millis: Mapping[str, int], unknown: Iterable[str]) -> tuple[StreamLag, ...]:
    """Return the lag by stream, for `WorkerStatus.streams`. Single-stream keys are left out.

    Args:
        millis: Lag by lease key.
        unknown: Keys of leases whose lag is unknown.
    """
    worst: dict[str, int] = {}
    for key, lag in millis.items():
        stream = key.rpartition(":")[0]
        worst[stream] = max(lag, worst.get(stream, 0))
    waiting = Counter(key.rpartition(":")[0] for key in unknown)
    found = [StreamLag(name, worst.get(name), waiting[name]) for name in {*worst, *waiting} - {""}]
    found.sort(key=lambda lag: (-(lag.millis or 0), -lag.unknown, lag.stream))
    return tuple(found[:MAX_STREAMS])


def lags_of(millis: Mapping[str, int]) -> tuple[LeaseLag, ...]:
    """Return the lag by lease, for `WorkerStatus.lags`: largest first."""
    worst = sorted(millis.items(), key=lambda item: (-item[1], item[0]))
    return tuple(LeaseLag(key, lag) for key, lag in worst)


def _cut_lags(status: WorkerStatus) -> WorkerStatus:
    """Leave out the small lags that a row does not list; count them, with their median."""
    large = sum(one.millis > SMALL_LAG_MILLIS for one in status.lags)
    listed = min(max(large, SMALL_LAGS), MAX_LAGS)
    others = status.lags[listed:]
    if not others:
        return status
    return replace(
        status,
        lags=status.lags[:listed],
        more_lags=len(others),
        more_lags_millis=others[len(others) // 2].millis,
    )


def status_text(status: WorkerStatus) -> str:
    """Return the status as JSON, cut to the limits."""
    hung, version, unavailable = status.hung, status.version, status.unavailable
    age = status.last_batch_seconds
    cut = replace(
        _cut_lags(status),
        paused=tuple(
            replace(one, reason=_shortened(one.reason), seconds=round(one.seconds, 1))
            for one in status.paused[:MAX_PAUSED]
        ),
        stalled=tuple(
            replace(
                one,
                step=one.step[:_MAX_STEP],
                seconds=round(one.seconds, 1),
                error=None if one.error is None else _shortened(one.error),
            )
            for one in status.stalled[:MAX_STALLED]
        ),
        failure=None if status.failure is None else _shortened(status.failure),
        unavailable=None
        if unavailable is None
        else tuple(
            replace(one, reason=_shortened(one.reason)) for one in unavailable[:MAX_UNAVAILABLE]
        ),
        totals=replace(status.totals, seconds=round(status.totals.seconds, 1)),
        last_batch_seconds=None if age is None else round(age, 1),
        memory_bytes=None,
        memory_limit_bytes=None,
        positions={},
        version=None if version is None else printable(version)[:MAX_VERSION_CHARACTERS],
        streams=status.streams[:MAX_STREAMS],
        hung=None
        if hung is None
        else replace(hung, step=hung.step[:_MAX_STEP], seconds=round(hung.seconds, 1)),
    )
    return msgspec.json.encode(cut).decode()


def _shortened(text: str) -> str:
    # Escaping makes a string up to ten times as long.
    return printable(text, MAX_REASON_CHARACTERS)[: 2 * MAX_REASON_CHARACTERS]


def status_of(text: str) -> WorkerStatus:
    """Parse a status.

    Raises:
        ValueError: The string is not a status, or is outside its limits.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"the status has {len(text)} characters, more than {_MAX_CHARACTERS}")
    try:
        found = msgspec.json.decode(text, type=WorkerStatus)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the status is invalid: {error}") from error
    return replace(
        found,
        paused=tuple(
            replace(one, lease_key=printable(one.lease_key, _MAX_KEY), reason=printable(one.reason))
            for one in found.paused
        ),
        lags=tuple(
            replace(one, lease_key=printable(one.lease_key, _MAX_KEY)) for one in found.lags
        ),
        failure=None if found.failure is None else printable(found.failure),
        unavailable=None
        if found.unavailable is None
        else tuple(
            UnavailableStream(printable(one.stream, _MAX_KEY), printable(one.reason))
            for one in found.unavailable
        ),
        version=None if found.version is None else printable(found.version),
        streams=tuple(
            replace(one, stream=printable(one.stream, _MAX_KEY)) for one in found.streams
        ),
        hung=None if found.hung is None else replace(found.hung, step=printable(found.hung.step)),
    )
