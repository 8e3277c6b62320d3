"""Plan as aligned text for `benchmarks.planner --trace`."""

from __future__ import annotations

from kcl_pipeline.planning.explain import LoadRow, PlanTable
from kcl_pipeline.planning.model import Plan

Value = str | int | float | None


def text_of(plan: Plan, table: PlanTable, lower_bound: int, most_rows: int = 50) -> str:
    """Return the plan as aligned text, with at most `most_rows` moves and workers each."""
    parts = [table.summary, f"at least {lower_bound} moves are needed", *plan.notes]
    if plan.spilled:
        parts.append(
            f"{len(plan.spilled)} leases that no worker may take: "
            f"{', '.join(plan.spilled[:most_rows])}"
        )
    moves: list[dict[str, Value]] = [
        {
            "lease": row.lease_key,
            "from": row.from_worker,
            "to": row.to_worker,
            "kbps": row.kbps,
            "reason": row.reason,
        }
        for row in table.moves
    ]
    workers = [_load_row(row, "worker") for row in table.workers]
    groups = [_load_row(row, "group") for row in table.groups]
    for rows in (moves, workers, groups):
        if rows:
            parts.append("")
            parts.extend(_aligned(rows[:most_rows]))
            if len(rows) > most_rows:
                parts.append(f"... and {len(rows) - most_rows} more")
    return "\n".join(parts)


def _load_row(row: LoadRow, kind: str) -> dict[str, Value]:
    found: dict[str, Value] = {kind: row.name}
    if kind != "group":
        found["group"] = row.group
    return found | {
        "leases before": row.leases_before,
        "leases after": row.leases_after,
        "kbps before": round(row.kbps_before, 1),
        "kbps after": round(row.kbps_after, 1),
        "utilization before": round(row.utilization_before, 3),
        "utilization after": round(row.utilization_after, 3),
    }


def _aligned(rows: list[dict[str, Value]]) -> list[str]:
    heads = list(rows[0])
    cells = [heads, *([_cell(row[head]) for head in heads] for row in rows)]
    widths = [max(len(line[k]) for line in cells) for k in range(len(heads))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _cell(value: Value) -> str:
    if value is None:
        return "-"
    return (
        f"{value:.1f}"
        if isinstance(value, float) and value >= 100
        else f"{value:.3f}"
        if isinstance(value, float)
        else str(value)
    )
