"""What a worker's row says of its shards: how far they are behind, and which ones are paused.

One attribute of ours with a small JSON document, which Java readers ignore. It is written with each
report, so that the command line and the leader see a worker whose processing thread hangs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from kcl_pipeline.text import printable

MAX_PAUSED: Final = 20
"""Paused leases in a row (our own limit); `WorkerStatus.paused_leases` counts all of them."""
MAX_REASON_CHARACTERS: Final = 200
_MAX_CHARACTERS: Final = 64 * 1024
_MAX_KEY: Final = 2048
_MAX_COUNT: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PausedLease:
    """A lease whose shard is not processed because its transform fails, and for how long."""

    lease_key: str
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker reports of its shards.

    Attributes:
        lag_millis: The age of its oldest record that is not committed; None: not known.
        unknown_lags: Of how many leases the lag is not known yet.
        paused: The first paused leases.
        paused_leases: How many there are.
    """

    lag_millis: int | None = None
    unknown_lags: int = 0
    paused: tuple[PausedLease, ...] = ()
    paused_leases: int = 0


class _Paused(msgspec.Struct, frozen=True, rename="camel"):
    lease_key: Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_KEY)]
    reason: Annotated[str, msgspec.Meta(max_length=2 * MAX_REASON_CHARACTERS)]
    seconds: Annotated[float, msgspec.Meta(ge=0, le=_MAX_COUNT)]


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    lag_millis: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    unknown_lags: Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)] = 0
    paused: Annotated[list[_Paused], msgspec.Meta(max_length=MAX_PAUSED)] = []
    paused_leases: Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)] = 0


def status_text(status: WorkerStatus) -> str:
    """The status as JSON; what is beyond the limits is left out."""
    paused = [
        _Paused(one.lease_key, printable(one.reason, MAX_REASON_CHARACTERS), round(one.seconds, 1))
        for one in status.paused[:MAX_PAUSED]
    ]
    found = _Status(status.lag_millis, status.unknown_lags, paused, status.paused_leases)
    return msgspec.json.encode(found).decode()


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
    return WorkerStatus(found.lag_millis, found.unknown_lags, paused, found.paused_leases)
