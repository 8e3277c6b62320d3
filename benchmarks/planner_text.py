"""Plan as aligned text for `benchmarks.planner --trace`."""

from __future__ import annotations

from kcl_pipeline.planning.explain import PlanTable, Value


def text_of(table: PlanTable, lower_bound: int, most_rows: int = 50) -> str:
    """Return the plan as aligned text, with at most `most_rows` moves and workers each."""
    parts = [table.summary, f"at least {lower_bound} moves are needed", *table.notes]
    if table.spilled:
        parts.append(
            f"{len(table.spilled)} leases that no worker may take: "
            f"{', '.join(table.spilled[:most_rows])}"
        )
    for rows in (table.rows(), table.worker_rows(), table.group_rows()):
        if rows:
            parts.append("")
            parts.extend(_aligned(rows[:most_rows]))
            if len(rows) > most_rows:
                parts.append(f"... and {len(rows) - most_rows} more")
    return "\n".join(parts)


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
