"""Evaluate the check of hung workers."""

from collections.abc import Sequence
from typing import Final

import dagster as dg

from kcl_pipeline.leases.state.worker_status import HungState, WorkerStatus
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.orchestration.assets.checks.health import Health
from kcl_pipeline.orchestration.assets.runs.metadata import MAX_ROWS, table_of
from kcl_pipeline.text import counted

HUNG: Final = "no_worker_hung"
ADVICE: Final = (
    "Look for worker_hung in the log of its run: the stacks of its threads name the call that "
    "blocks. Terminate the run, or kill its process: no record is lost, and other workers read its "
    'shards. See "A worker is hung" in docs/operations.md'
)


def hung(workers: Sequence[WorkerMetrics]) -> Health:
    """Whether the processing thread of every worker makes progress while records wait."""
    found = [
        {
            "worker": worker.worker_id,
            "step": worker.status.hung.step,
            "seconds": round(worker.status.hung.seconds),
            "leases": worker.status.hung.leases,
            "run": worker.run_id,
        }
        for worker in sorted(workers, key=lambda row: row.worker_id)
        if worker.status is not None and worker.status.hung is not None
    ]
    first = found[0] if found else {}
    count = f"{counted(len(found), 'worker')} {'is' if len(found) == 1 else 'are'} hung"
    return Health(
        HUNG,
        not found,
        f"{count}. The first, {first['worker']}, has been in step "
        f"{first['step']} for {first['seconds']} s while records of "
        f"{counted(int(str(first['leases'])), 'lease')} wait. "
        f"{ADVICE}"
        if found
        else "no worker is hung",
        dg.AssetCheckSeverity.ERROR,
        {"hung": len(found), "workers": table_of(found[:MAX_ROWS])},
    )


def reported_hung(
    instance: dg.DagsterInstance, asset: dg.AssetKey, *, except_for: str
) -> list[WorkerMetrics]:
    """Return the hung workers of the last evaluation of the check.

    Args:
        instance: The Dagster instance.
        asset: The asset of the check.
        except_for: Id of a worker that is left out.
    """
    key = dg.AssetCheckKey(asset, HUNG)
    record = instance.event_log_storage.get_latest_asset_check_execution_by_key([key]).get(key)
    event = None if record is None or record.event is None else record.event.dagster_event
    if event is None:
        return []
    table = event.asset_check_evaluation_data.metadata.get("workers")
    rows = table.records if isinstance(table, dg.TableMetadataValue) else ()
    return [
        WorkerMetrics(
            str(row.data["worker"]),
            0,
            run_id=None if row.data["run"] is None else str(row.data["run"]),
            status=WorkerStatus(
                hung=HungState(
                    str(row.data["step"]),
                    float(str(row.data["seconds"])),
                    int(str(row.data["leases"])),
                )
            ),
        )
        for row in rows
        if row.data["worker"] != except_for
    ]
