"""Duration and heartbeat of the leader lock."""

from __future__ import annotations

from typing import Final

from kcl_pipeline.config import ConsumerSettings, LeaderSettings

SENSOR_LOCK_MILLIS: Final = 15_000
_SHORTEST_MILLIS: Final = 2_000
_LONGEST_MILLIS: Final = 30_000


def lock_settings(settings: ConsumerSettings, *, is_sensor: bool) -> LeaderSettings:
    """Return the times of the leader lock.

    A duration that is not set follows the failover time, so that the lock of a leader that stopped
    expires before its leases do. Standbys have watched the leases meanwhile.

    Args:
        settings: All settings.
        is_sensor: Whether the sensor holds the lock. Its ticks are at least 5 s apart.
    """
    leader, chosen = settings.leader, settings.leader.model_fields_set
    if "leader_lease_duration_millis" in chosen:
        return leader
    duration = settings.lease.failover_time_millis * 4 // 5
    duration = min(max(duration, _SHORTEST_MILLIS), _LONGEST_MILLIS)
    if is_sensor:
        duration = max(duration, SENSOR_LOCK_MILLIS)
    heartbeat = duration * 5 // 16
    if "leader_heartbeat_period_millis" in chosen:
        heartbeat = leader.leader_heartbeat_period_millis
    return leader.model_copy(
        update={
            "leader_lease_duration_millis": max(duration, 2 * heartbeat),
            "leader_heartbeat_period_millis": heartbeat,
        }
    )
