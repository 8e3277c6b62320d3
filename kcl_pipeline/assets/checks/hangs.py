"""Evaluate the check of hung workers."""

from collections.abc import Sequence
from typing import Final

import dagster as dg

from kcl_pipeline.assets.checks.health import Health
from kcl_pipeline.assets.runs.metadata import MAX_ROWS, table_of
from kcl_pipeline.leases.tables import WorkerMetrics

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
    return Health(
        HUNG,
        not found,
        f"{len(found)} workers are hung. The first, {first['worker']}, has been in step "
        f"{first['step']} for {first['seconds']} s while records of {first['leases']} leases wait. "
        f"{ADVICE}"
        if found
        else "no worker is hung",
        dg.AssetCheckSeverity.ERROR,
        {"hung": len(found), "workers": table_of(found[:MAX_ROWS])},
    )
