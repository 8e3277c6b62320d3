"""Draw the load per worker and group before and after the last plan."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kcl_pipeline.orchestration.sensors.reports.figures.drawing import (
    COLOURS,
    OTHERS,
    add_legend,
    data_uri,
    name_axes,
    new_figure,
    plain,
)
from kcl_pipeline.planning.explain import LoadRow, PlanTable

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

MAX_BARS: Final = 14
_BAR: Final = 0.4


def draw_load(table: PlanTable) -> str:
    """Draw the load of the workers and groups of a plan and return the figure as a data URI.

    Workers that the plan changes come first, then those with the largest load.
    """
    rows = max(min(len(table.workers), MAX_BARS), len(table.groups[:MAX_BARS]), 2)
    figure, (workers, groups) = new_figure(1.2 + 0.22 * rows, panels=2)
    entries = _bars(workers, table.workers, "worker", rows)
    _bars(groups, table.groups, "group", rows)
    add_legend(figure, entries, "outside upper right", columns=2)
    return data_uri(figure)


def _bars(
    axes: "Axes", rows: Sequence[LoadRow], kind: str, height: int
) -> list[tuple["Artist", str]]:
    changed_first = sorted(rows, key=lambda row: row.leases_before == row.leases_after)
    # The uppermost bar has the largest position.
    shown = changed_first[:MAX_BARS][::-1]
    by_kbps = any(row.kbps_before or row.kbps_after for row in rows)
    before = [row.kbps_before if by_kbps else float(row.leases_before) for row in shown]
    after = [row.kbps_after if by_kbps else float(row.leases_after) for row in shown]
    places = range(len(shown))
    first = axes.barh([p + _BAR / 2 for p in places], before, _BAR, color=OTHERS)
    second = axes.barh([p - _BAR / 2 for p in places], after, _BAR, color=COLOURS[0])
    axes.set_yticks(list(places), [plain(row.name, 24) for row in shown])
    axes.set_xlim(left=0)
    axes.set_ylim(len(shown) - height - 0.5, len(shown) - 0.5)
    hidden = len(rows) - len(shown)
    title = f"Load by {kind}" + (f" ({hidden} not shown)" if hidden else "")
    name_axes(axes, title, "KiB/s" if by_kbps else "leases", "")
    bars = zip((first, second), ("before", "after"), strict=True)
    return [(container.patches[0], label) for container, label in bars if container.patches]
