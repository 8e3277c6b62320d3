"""Define the job that compacts and vacuums the tables of a pipeline.

Run it on a schedule. It may run while workers write.
"""

from collections.abc import Mapping
from typing import Any

import dagster as dg
from pydantic import Field

from kcl_pipeline.batch import dead_letter_address
from kcl_pipeline.delta.maintenance import (
    DEFAULT_RETENTION_HOURS,
    MINIMUM_RETENTION_HOURS,
    compact,
    measured_vacuum,
    small_files,
    table_exists,
)
from kcl_pipeline.orchestration.assets.contract import PipelineLike
from kcl_pipeline.orchestration.assets.names import Names, table_uri


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
        description="Change nothing; report which files would be merged and removed",
    )
    compact: bool = Field(default=True, description="Merge small files")
    vacuum: bool = Field(default=True, description="Remove files that no version uses")
    dead_letters: bool = Field(
        default=False, description="Also compact and vacuum the dead-letter table"
    )


def build_maintenance_job(pipeline: PipelineLike, names: Names) -> dg.JobDefinition | None:
    """Build the job `<name>_maintenance`; None for a sink that is not a table."""
    uri = table_uri(pipeline.sink)
    if uri is None:
        return None
    storage_options: dict[str, str] = dict(getattr(pipeline.sink, "storage_options", {}))
    dead_letters = dead_letter_address(pipeline.sink)

    @dg.op(
        name=f"{names.prefix}_maintain",
        description=f"Merges small files of `{uri}` and removes files that no version uses.",
    )
    def maintain(context: dg.OpExecutionContext, config: MaintenanceConfig) -> None:
        exists = table_exists(uri, storage_options)  # the first batch creates it
        metadata = _maintain(uri, storage_options, config) if exists else {"exists": False}
        if config.dead_letters and dead_letters and table_exists(dead_letters, storage_options):
            found = _maintain(dead_letters, storage_options, config)
            metadata |= {f"dead_letter_{name}": value for name, value in found.items()}
        text = metadata if exists else "there is no table yet; the first batch creates it"
        context.log.info("%s: %s", uri, text)
        context.log_event(dg.AssetObservation(names.output, metadata=metadata))

    @dg.job(
        name=names.maintenance_job,
        executor_def=dg.in_process_executor,
        description=f"Compacts and vacuums the table of {names.application}.",
    )
    def maintenance() -> None:
        maintain()

    return maintenance


def _maintain(
    uri: str, storage_options: Mapping[str, str], config: MaintenanceConfig
) -> dict[str, Any]:
    """Compact and vacuum one table, and return the figures."""
    metadata: dict[str, Any] = {}
    if config.compact and config.dry_run:
        small = small_files(uri, storage_options)
        metadata |= {"files_to_compact": small.files, "bytes_to_compact": small.bytes}
    elif config.compact:
        done = compact(uri, storage_options)
        metadata |= {"files_compacted": done.files_removed, "files_made": done.files_added}
    if config.vacuum:
        removed = measured_vacuum(
            uri, config.retention_hours, storage_options, dry_run=config.dry_run
        )
        end = "to_remove" if config.dry_run else "removed"
        metadata |= {f"files_{end}": len(removed.files), f"bytes_{end}": removed.bytes}
        metadata["retention_hours"] = removed.retention_hours
    return metadata
