"""Shards that are paused, with reason and time of the next retry.

Their transform fails, or the table is not the one of their checkpoint (`OtherTableError`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.events import ShardPaused, ShardResumed
from kcl_pipeline.worker.consumer import ConsumerState, ShardConsumer
from kcl_pipeline.worker.dependencies import WorkerDependencies

FIRST_RETRY_SECONDS: Final = 1.0
LONGEST_RETRY_SECONDS: Final = 60.0
GIVEN_SECONDS: Final = 60.0
"""How long a shard that was given away while it was paused counts for the end of the worker."""


@dataclass(frozen=True, slots=True)
class ShardPause:
    """Reason and start (monotonic seconds) of a shard's pause, and the attempts so far."""

    reason: str
    since: float
    attempts: int = 1

    @property
    def retry_seconds(self) -> float:
        """Wait before the next attempt. It doubles from 1 s to 60 s."""
        doubled: float = FIRST_RETRY_SECONDS * 2 ** min(self.attempts - 1, 10)
        return min(doubled, LONGEST_RETRY_SECONDS)


class PausedShards:
    """The paused shards of one worker. Any thread may call `current` and `reasons`."""

    def __init__(self, dependencies: WorkerDependencies) -> None:
        self._dependencies = dependencies
        self._lock = threading.Lock()
        self._pauses: dict[str, ShardPause] = {}
        # By lease key, when a paused shard was given away, and the reason of its pause
        self._given: dict[str, tuple[float, str]] = {}
        self._refused: set[str] = set()

    def current(self) -> dict[str, ShardPause]:
        """Return the paused shards by lease key."""
        with self._lock:
            return dict(self._pauses)

    def reasons(self) -> dict[str, str]:
        """Return the reason of each pause by lease key."""
        return {key: pause.reason for key, pause in self.current().items()}

    def reasons_at_the_end(self) -> dict[str, str]:
        """Return the reasons of a worker that was asked to end.

        The leader moves its leases as soon as it was asked, and the worker learns up to a report
        period later that it was. So a shard also counts if it was paused when it was given away, at
        most `GIVEN_SECONDS` ago.
        """
        since = self._dependencies.clock.monotonic() - GIVEN_SECONDS
        given = {key: reason for key, (at, reason) in self._given.items() if at >= since}
        return given | self.reasons()

    def pause(self, lease_key: str, reason: str) -> float:
        """Note a failed attempt; return the wait before the next one in seconds.

        The event is repeated when the reason changes, and after 2, 4, 8, ... attempts.
        """
        now = self._dependencies.clock.monotonic()
        before = self._pauses.get(lease_key)
        pause = (
            ShardPause(reason, now)
            if before is None
            else ShardPause(reason, before.since, before.attempts + 1)
        )
        with self._lock:
            self._pauses[lease_key] = pause
        is_power_of_two = pause.attempts & (pause.attempts - 1) == 0
        if before is None or before.reason != reason or is_power_of_two:
            self._dependencies.events(
                ShardPaused(
                    self._dependencies.worker_id,
                    lease_key,
                    reason,
                    pause.attempts,
                    now - pause.since,
                    pause.retry_seconds,
                )
            )
        return pause.retry_seconds

    def follow(self, consumers: Mapping[str, ShardConsumer]) -> None:
        """Pause the shards for which the table was refused, and resume them when it is accepted.

        Shards that this worker does not hold any more are forgotten.
        """
        now = self._dependencies.clock.monotonic()
        for key in [key for key in self._pauses if key not in consumers]:
            with self._lock:
                self._given[key] = now, self._pauses.pop(key).reason
        for key in [key for key, (at, _) in self._given.items() if now - at > GIVEN_SECONDS]:
            del self._given[key]
        self._refused &= consumers.keys()
        for key, consumer in consumers.items():
            if consumer.refused is not None:
                wait = self.pause(key, consumer.refused)
                consumer.due, consumer.refused = self._dependencies.clock.monotonic() + wait, None
                self._refused.add(key)
            elif key in self._refused and consumer.state is ConsumerState.READING:
                self._refused.discard(key)
                self.resume([key])

    def resume(self, lease_keys: Collection[str]) -> None:
        """End the pauses of these shards, because they were committed or their table is back."""
        for key in self._given.keys() & set(lease_keys):
            del self._given[key]
        for key in [key for key in self._pauses if key in lease_keys]:
            with self._lock:
                pause = self._pauses.pop(key)
            seconds = self._dependencies.clock.monotonic() - pause.since
            self._dependencies.events(
                ShardResumed(self._dependencies.worker_id, key, pause.attempts, seconds)
            )


def reason_sentence(paused: Mapping[str, str], unread: str | None) -> str:
    """Return why a worker failed.

    Args:
        paused: Reasons of paused shards. The sentence has their number and the first reason.
        unread: What a drain did not read. None: it read everything.
    """
    if not paused:
        return unread or "no shard is paused"
    key = min(paused)
    count = f"{len(paused)} shards are paused" if len(paused) > 1 else "a shard is paused"
    return "; ".join(filter(None, (unread, f"{count}: {key}: {paused[key]}")))
