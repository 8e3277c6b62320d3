"""Menus: the versioned lists from which a seed draws its incidents and faults.

A seed draws by index, so one added name changes the plan of every seed. A menu therefore never
changes; additions go into a new one. `tests/verification/test_simulation_menus.py` has a digest of
each. `simulate(seed, StormOptions(menu=1))` replays a seed under an older menu.

To add an incident, write the method in `hosts.HostIncidents`, `data.DataIncidents` or
`streams.StreamIncidents`, and append its name in a new menu.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from verification.simulation.environment.calls import (
    OLD_SINK_SITE,
    OLD_SITE,
    SITES,
    Fault,
    applicable,
)


@dataclass(frozen=True, slots=True)
class Menu:
    """What seeds draw from, in this order.

    Attributes:
        version: Number of this menu.
        incidents: Names of methods of `HostIncidents`, `DataIncidents` and `StreamIncidents`.
        sites: Call sites to whose faults seeds are steered.
        faults: The faults that the chance of each call draws from.
        stops_leader: Whether every other graceful stop of a rehearsal comes with a new leader.
        leaderless: Whether some fleets have no leader, and the others fall back when nobody leads.
        deletes_rows: Whether deleted rows repeat nothing in these fleets.
        records_sink: Whether workers record the sink.
        rare_sites: How many times as likely a fault is at a call site that is seldom reached.
    """

    version: int
    incidents: tuple[str, ...]
    sites: tuple[str, ...]
    faults: tuple[Fault, ...]
    stops_leader: bool = False
    leaderless: bool = False
    deletes_rows: bool = False
    rare_sites: Mapping[str, float] = field(default_factory=dict)
    records_sink: bool = False

    @property
    def cells(self) -> tuple[tuple[str, Fault], ...]:
        """The table of faults and call sites: every fault at every call where it can happen."""
        return tuple(
            (site, fault) for site in self.sites for fault in self.faults if applicable(site, fault)
        )


_INCIDENTS_1: Final = (
    "clock_jump",
    "crash",
    "crash_and_rename",
    "delete_lock",
    "delete_row",
    "delete_worker_row",
    "deploy",
    "drain_request",
    "drain_run",
    "duplicate_worker_id",
    "edit_row",
    "join",
    "join_quirky",
    "late_commit",
    "leader_crash",
    "leader_deploy",
    "leader_partition",
    "leader_pause",
    "merge",
    "mixed_strategy",
    "partition",
    "pause",
    "poison",
    "retention_trim",
    "slow_transform",
    "split",
    "stale_index",
    "stale_scan",
    "throttled_stream",
    "throttled_tables",
    "update_shard_count",
)

_INCIDENTS_2: Final = (
    *_INCIDENTS_1,
    "failing_handoff",
    "short_lived_workers",
    "stream_outage",
    "sink_outage",
    "foreign_application",
    "delete_row_under_way",
    "expired_credentials",
    "hot_worker",
)

_INCIDENTS_3: Final = (
    *_INCIDENTS_2,
    "failing_transform",
    "unreadable_row",
    "dry_run",
)

_INCIDENTS_4: Final = (
    *_INCIDENTS_3,
    "stream_comes",
    "namesake_comes",
    "stream_goes",
    "stream_returns",
    "throttled_reads",
    "hung_calls",
)

_INCIDENTS_5: Final = (*_INCIDENTS_4, "no_leader")

_INCIDENTS_7: Final = (*_INCIDENTS_5, "delete_rows")

_INCIDENTS_8: Final = (*_INCIDENTS_7, "delete_tables")

_SITES_2: Final = (SITES[0], OLD_SITE, *SITES[1:])
_SITES_1: Final = tuple(site for site in _SITES_2 if site != "leases.TransactWriteItems")

_FAULTS_1: Final = (
    Fault.THROTTLED,
    Fault.SERVER_ERROR,
    Fault.TIMEOUT_BEFORE,
    Fault.TIMEOUT_AFTER,
    Fault.CRASH_BEFORE,
    Fault.CRASH_AFTER,
    Fault.PAUSE_BEFORE,
    Fault.PAUSE_AFTER,
)

_FAULTS_2: Final = (*_FAULTS_1, Fault.HUNG, Fault.LANDS_LATE)

_RARE_SITES: Final = {
    "sink.fence": 12.0,
    "sink.write_dead_letters": 3.0,
    "sink.ensure_table": 2.0,
    "leases.DeleteItem": 4.0,
    "leases.TransactWriteItems": 2.0,
    "workers.DeleteItem": 2.0,
    "coordinator.DeleteItem": 3.0,
}
"""Without it, some cell has no fault in one of some hundred sets of 2,300 seeds."""

_MENU_6: Final = Menu(6, _INCIDENTS_5, SITES, _FAULTS_2, stops_leader=True, leaderless=True)
_MENU_7: Final = replace(_MENU_6, version=7, incidents=_INCIDENTS_7, deletes_rows=True)
_MENU_8: Final = replace(_MENU_7, version=8, incidents=_INCIDENTS_8)
_MENU_9: Final = replace(_MENU_8, version=9, rare_sites=_RARE_SITES)
_MENU_10: Final = replace(
    _MENU_9,
    version=10,
    sites=tuple(site for site in SITES if site != OLD_SINK_SITE),
    rare_sites={site: factor for site, factor in _RARE_SITES.items() if site != OLD_SINK_SITE},
    records_sink=True,
)

MENUS: Final = {
    1: Menu(1, _INCIDENTS_1, _SITES_1, _FAULTS_1),
    2: Menu(2, _INCIDENTS_2, _SITES_2, _FAULTS_2, stops_leader=True),
    3: Menu(3, _INCIDENTS_3, _SITES_2, _FAULTS_2, stops_leader=True),
    4: Menu(4, _INCIDENTS_4, SITES, _FAULTS_2, stops_leader=True),
    5: Menu(5, _INCIDENTS_5, SITES, _FAULTS_2, stops_leader=True, leaderless=True),
    6: _MENU_6,
    7: _MENU_7,
    8: _MENU_8,
    9: _MENU_9,
    10: _MENU_10,
}

CURRENT_MENU: Final = max(MENUS)
"""The version that seeds draw from unless another one is requested."""


def menu_of(version: int) -> Menu:
    """Return the menu of a version.

    Raises:
        ValueError: There is no such version.
    """
    if version not in MENUS:
        raise ValueError(f"menu={version} is not a menu. Write one of {sorted(MENUS)}.")
    return MENUS[version]
