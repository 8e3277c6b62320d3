"""The job that keeps the output table in shape: compaction, then vacuum. Put it on a schedule; it
may run while workers write.
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
        description="Files that no version of so many hours has are removed; longer than any "
        "worker can be paused, and than any query reads",
    )
    dry_run: bool = Field(
        default=False,
        description="Compact nothing and remove nothing; say which files would be removed",
    )


def build_maintenance_job(pipeline: PipelineLike, names: Names) -> dg.JobDefinition | None:
    """The job `<name>_maintenance`; None for a sink that is no table."""
    uri = table_uri(pipeline.sink)
    if uri is None:
        return None
    storage_options: dict[str, str] = dict(getattr(pipeline.sink, "storage_options", {}))

    @dg.op(
        name=f"{names.prefix}_maintain",
        description=f"Small files of `{uri}` into larger ones; files of no version removed.",
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
