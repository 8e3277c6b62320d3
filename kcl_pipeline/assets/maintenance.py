"""Define the job that compacts and vacuums the output table.

Run it on a schedule. It may run while workers write.
"""

from typing import Any

import dagster as dg
from pydantic import Field

from kcl_pipeline.assets.contract import PipelineLike
from kcl_pipeline.assets.names import Names, table_uri
from kcl_pipeline.delta.maintenance import (
    DEFAULT_RETENTION_HOURS,
    MINIMUM_RETENTION_HOURS,
    compact,
    vacuum,
)


class MaintenanceConfig(dg.Config):
    """What a run of the maintenance job does."""

    retention_hours: int = Field(
        default=DEFAULT_RETENTION_HOURS,
        ge=MINIMUM_RETENTION_HOURS,
        description="Removes files that no table version of the last so many hours uses. Must be "
        "longer than any pause of a worker and than any query",
    )
    dry_run: bool = Field(
        default=False,
        description="Change nothing; report which files would be removed",
    )


def build_maintenance_job(pipeline: PipelineLike, names: Names) -> dg.JobDefinition | None:
    """Build the job `<name>_maintenance`; None for a sink that is not a table."""
    uri = table_uri(pipeline.sink)
    if uri is None:
        return None
    storage_options: dict[str, str] = dict(getattr(pipeline.sink, "storage_options", {}))

    @dg.op(
        name=f"{names.prefix}_maintain",
        description=f"Merges small files of `{uri}` and removes files that no version uses.",
    )
    def maintain(context: dg.OpExecutionContext, config: MaintenanceConfig) -> None:
        metadata: dict[str, Any] = {}
        if not config.dry_run:
            done = compact(uri, storage_options)
            metadata = {"files_compacted": done.files_removed, "files_made": done.files_added}
        removed = vacuum(uri, config.retention_hours, storage_options, dry_run=config.dry_run)
        key = "files_to_remove" if config.dry_run else "files_removed"
        context.log.info("%s: %s", uri, metadata | {key: len(removed)})
        context.log_event(
            dg.AssetObservation(names.output, metadata=metadata | {key: len(removed)})
        )

    @dg.job(
        name=names.maintenance_job,
        executor_def=dg.in_process_executor,
        description=f"Compacts and vacuums the table of {names.application}.",
    )
    def maintenance() -> None:
        maintain()

    return maintenance
