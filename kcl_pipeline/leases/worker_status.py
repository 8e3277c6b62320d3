"""What a worker's row says of its shards: how far they are behind, which ones are paused, and
what goes wrong with its batches.

One attribute of ours with a small JSON document, which Java readers ignore. It is written with each
report, so that the command line and the leader see a worker whose processing thread hangs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from kcl_pipeline.text import printable

MAX_PAUSED: Final = 20
"""Paused leases in a row (our own limit); `WorkerStatus.paused_leases` counts all of them."""
MAX_LAGS: Final = 20
"""Leases with their lag in a row (our own limit): those that are furthest behind."""
MAX_REASON_CHARACTERS: Final = 200
_MAX_CHARACTERS: Final = 64 * 1024
_MAX_KEY: Final = 2048
_MAX_COUNT: Final = 2**31 - 1
_MAX_MILLIS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class PausedLease:
    """A lease whose shard is not processed because its transform fails, and for how long."""

    lease_key: str
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LeaseLag:
    """The age of the oldest record of a lease that is not committed."""

    lease_key: str
    millis: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker reports of its shards.

    Attributes:
        lag_millis: The age of its oldest record that is not committed; None: not known.
        unknown_lags: Of how many leases the lag is not known yet.
        paused: The first paused leases.
        paused_leases: How many there are.
        lags: The leases that are furthest behind, the first one most; at most `MAX_LAGS`.
        dead_letters: Records that failed, were handed back or skipped since the worker started.
        failed_batches: Batches that the sink refused since the last one that it took.
        failure: Why it refused the last one; None when it took it.
    """

    lag_millis: int | None = None
    unknown_lags: int = 0
    paused: tuple[PausedLease, ...] = ()
    paused_leases: int = 0
    lags: tuple[LeaseLag, ...] = ()
    dead_letters: int = 0
    failed_batches: int = 0
    failure: str | None = None


def furthest_behind(millis: Mapping[str, int]) -> tuple[LeaseLag, ...]:
    """The leases with the largest lag, for `WorkerStatus.lags`."""
    worst = sorted(millis.items(), key=lambda one: (-one[1], one[0]))[:MAX_LAGS]
    return tuple(LeaseLag(key, lag) for key, lag in worst)


class _Paused(msgspec.Struct, frozen=True, rename="camel"):
    lease_key: Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_KEY)]
    reason: Annotated[str, msgspec.Meta(max_length=2 * MAX_REASON_CHARACTERS)]
    seconds: Annotated[float, msgspec.Meta(ge=0, le=_MAX_COUNT)]


class _Lag(msgspec.Struct, frozen=True, rename="camel"):
    lease_key: Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_KEY)]
    millis: Annotated[int, msgspec.Meta(ge=0, le=_MAX_MILLIS)]


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    lag_millis: Annotated[int, msgspec.Meta(ge=0, le=_MAX_MILLIS)] | None = None
    unknown_lags: Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)] = 0
    paused: Annotated[list[_Paused], msgspec.Meta(max_length=MAX_PAUSED)] = []
    paused_leases: Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)] = 0
    lags: Annotated[list[_Lag], msgspec.Meta(max_length=MAX_LAGS)] = []
    dead_letters: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    failed_batches: Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)] = 0
    failure: Annotated[str, msgspec.Meta(max_length=2 * MAX_REASON_CHARACTERS)] | None = None


def status_text(status: WorkerStatus) -> str:
    """The status as JSON; what is beyond the limits is left out."""
    paused = [
        _Paused(one.lease_key, _shortened(one.reason), round(one.seconds, 1))
        for one in status.paused[:MAX_PAUSED]
    ]
    found = _Status(
        status.lag_millis,
        status.unknown_lags,
        paused,
        status.paused_leases,
        [_Lag(one.lease_key, one.millis) for one in status.lags[:MAX_LAGS]],
        status.dead_letters,
        status.failed_batches,
        None if status.failure is None else _shortened(status.failure),
    )
    return msgspec.json.encode(found).decode()


def _shortened(text: str) -> str:
    """Escaping makes a string up to ten times as long."""
    return printable(text, MAX_REASON_CHARACTERS)[: 2 * MAX_REASON_CHARACTERS]


def status_of(text: str) -> WorkerStatus:
    """Read it back. Raises `ValueError` when it is none, or beyond its limits."""
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"the status has {len(text)} characters, more than {_MAX_CHARACTERS}")
    try:
        found = msgspec.json.decode(text, type=_Status)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the status is not what a worker writes: {error}") from error
    paused = tuple(
        PausedLease(printable(one.lease_key, _MAX_KEY), printable(one.reason), one.seconds)
        for one in found.paused
    )
    return WorkerStatus(
        found.lag_millis,
        found.unknown_lags,
        paused,
        found.paused_leases,
        tuple(LeaseLag(printable(one.lease_key, _MAX_KEY), one.millis) for one in found.lags),
        found.dead_letters,
        found.failed_batches,
        None if found.failure is None else printable(found.failure),
    )
