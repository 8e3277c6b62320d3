"""Show how the leases are distributed over the workers, as a pandas DataFrame."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kcl_pipeline.leases.lease.values import Lease

if TYPE_CHECKING:
    import pandas as pd

COLUMNS: Final = {
    "group": "object",
    "worker": "object",
    "leases": "int64",
    "ended": "int64",
    "handing_over": "int64",
    "throughput_kbps": "float64",
}
"""The columns and their types."""


def distribution(
    leases: Iterable[Lease], worker_ids: Iterable[str], separator: str
) -> pd.DataFrame:
    """Count the leases by worker group and worker.

    Args:
        leases: The leases. A lease in a handoff counts for the worker that still processes it.
        worker_ids: Workers that have a row even if they have no lease.
        separator: Separates the group in a worker id.

    Returns:
        The columns `COLUMNS`, one row per worker, sorted by group and worker. Leases without an
        owner are in one row whose group and worker are empty texts.
    """
    import pandas as pd  # noqa: PLC0415 (it takes half a second, and few processes need it)

    held: dict[str, list[Lease]] = {worker_id: [] for worker_id in worker_ids}
    for lease in leases:
        held.setdefault(lease.actual_owner or "", []).append(lease)
    rows = [
        {
            "group": worker.partition(separator)[0],
            "worker": worker,
            "leases": sum(not lease.ended for lease in mine),
            "ended": sum(lease.ended for lease in mine),
            "handing_over": sum(lease.in_handoff for lease in mine),
            "throughput_kbps": sum(
                lease.throughput_kbps or 0.0 for lease in mine if not lease.ended
            ),
        }
        for worker, mine in held.items()
    ]
    frame = pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)
    return frame.sort_values(["group", "worker"], ignore_index=True)
