"""Define the asset checks whose execution observes a table for a time."""

import dagster as dg

from kcl_pipeline.assets.access import PipelineResources
from kcl_pipeline.assets.checks.leadership import LEADER, observe_leader
from kcl_pipeline.assets.checks.unread import CHECKPOINTS, observe_checkpoints
from kcl_pipeline.assets.limits import CheckLimits
from kcl_pipeline.assets.names import Names
from kcl_pipeline.clock import Clock
from kcl_pipeline.leases.lease.rejected import RejectedRows
from kcl_pipeline.text import duration_text


def build_observing_checks(
    names: Names, limits: CheckLimits, clock: Clock, rejected: RejectedRows
) -> list[dg.AssetChecksDefinition]:
    """Build the checks of checkpoints and of the leader."""

    @dg.asset_check(
        asset=names.lease_table,
        name=CHECKPOINTS,
        description="The checkpoint of every shard with old unread records changes within "
        f"{duration_text(limits.checkpoint_age_seconds)}. An execution observes those shards for "
        "this time at most, and ends at once if there are none.",
        required_resource_keys={names.leases_resource, names.workers_resource},
    )
    def checkpoints_advance(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        resources = PipelineResources(names, context)
        return observe_checkpoints(
            resources.leases, resources.workers, limits.checkpoint_age_seconds, clock, rejected
        ).result()

    @dg.asset_check(
        asset=names.coordinator_state_table,
        name=LEADER,
        description="A leader renews its lock. An execution observes the lock for "
        f"{duration_text(limits.leader_absent_seconds)} at most.",
        required_resource_keys={names.coordinator_resource},
    )
    def leader_present(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        table = PipelineResources(names, context).coordinator
        return observe_leader(table, limits.leader_absent_seconds, clock).result()

    return [checkpoints_advance, leader_present]
