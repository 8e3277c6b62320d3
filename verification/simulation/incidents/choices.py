"""What a seed draws from: incidents, faults, and the calls at which they happen.

A seed draws by index: a name that is added or removed changes the plan of every seed.

To add an incident, write the method in `hosts.HostIncidents`, `data.DataIncidents`,
`streams.StreamIncidents` or `table.TableIncidents`, and append its name here.
"""

from __future__ import annotations

from typing import Final

from verification.simulation.environment.calls import SITES, Fault, applicable

INCIDENTS: Final = (
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
    "failing_handoff",
    "short_lived_workers",
    "stream_outage",
    "sink_outage",
    "foreign_application",
    "delete_row_under_way",
    "expired_credentials",
    "hot_worker",
    "failing_transform",
    "unreadable_row",
    "dry_run",
    "stream_comes",
    "namesake_comes",
    "stream_goes",
    "stream_returns",
    "throttled_reads",
    "hung_calls",
    "no_leader",
    "delete_rows",
    "delete_tables",
    "put_back_table",
    "restore_table",
    "seek",
)
"""Names of methods of `HostIncidents`, `DataIncidents`, `StreamIncidents` and `TableIncidents`."""

RARE_SITES: Final = {
    "sink.write_dead_letters": 3.0,
    "sink.ensure": 2.0,
    "leases.DeleteItem": 4.0,
    "leases.TransactWriteItems": 2.0,
    "workers.DeleteItem": 2.0,
    "coordinator.DeleteItem": 3.0,
}
"""How many times as likely a fault is at a call site that is seldom reached.

Without it, some cell has no fault in one of some hundred sets of 2,300 seeds.
"""

CELLS: Final = tuple((site, fault) for site in SITES for fault in Fault if applicable(site, fault))
"""Every fault at every call where it can happen. Seeds are steered to them in turn."""
