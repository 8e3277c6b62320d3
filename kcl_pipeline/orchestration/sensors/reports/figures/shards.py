"""Draw the shards of a stream over its reshards."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.orchestration.sensors.reports.figures.drawing import (
    COLOURS,
    OTHERS,
    TEXT,
    add_legend,
    data_uri,
    name_axes,
    new_figure,
    plain,
)
from kcl_pipeline.orchestration.sensors.reports.streams import by_stream
from kcl_pipeline.orchestration.sensors.reports.tables import shard_text
from kcl_pipeline.shards import MAX_HASH_KEY

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

MAX_SHARDS: Final = 256
_LABEL_SHARE: Final = 0.03
"""A shard with fewer hash keys has no number in the figure."""
_GAP: Final = 0.002
_HEIGHT_INCHES: Final = 3.4
_WIDTH: Final = 0.6
_STATES: Final = {"read": COLOURS[0], "finished": OTHERS, "no owner": COLOURS[1]}


@dataclass(frozen=True, slots=True)
class Box:
    """One shard.

    Attributes:
        lease: Its lease.
        generation: 0 for a shard without a lease of a parent; otherwise one more than the latest
            parent.
        low: First hash key as a share of all, 0 to 1.
        high: End of the hash keys as a share of all.
        state: Whether it is read.
    """

    lease: Lease
    generation: int
    low: float
    high: float
    state: str


def stream_to_draw(leases: Sequence[Lease]) -> str | None:
    """Return the stream with the most reshards, then the most leases; None for a single stream."""
    groups = by_stream(leases)
    return max(
        groups,
        key=lambda name: (
            sum(bool(one.parent_shard_ids) for one in groups[name]),
            len(groups[name]),
            name or "",
        ),
        default=None,
    )


def boxes(leases: Sequence[Lease]) -> list[Box]:
    """Return the shards of one stream, by generation and hash key.

    Of more than `MAX_SHARDS`, those that are read and the latest generations are kept.
    """
    by_shard = {lease.shard_id: lease for lease in leases}
    generations: dict[str, int] = {}
    for shard in sorted(by_shard):
        _generation(shard, by_shard, generations)
    found = [
        Box(
            lease,
            generations[shard],
            lease.hash_key_range.start / (MAX_HASH_KEY + 1),
            (lease.hash_key_range.end + 1) / (MAX_HASH_KEY + 1),
            _state(lease),
        )
        for shard, lease in by_shard.items()
        if lease.hash_key_range is not None
    ]
    found.sort(key=lambda box: (box.lease.ended, -box.generation, box.low))
    return sorted(found[:MAX_SHARDS], key=lambda box: (box.generation, box.low))


def _generation(shard: str, by_shard: dict[str, Lease], known: dict[str, int]) -> int:
    """Set the generations of a shard and its ancestors, without recursion."""
    waiting = [shard]
    while waiting:
        current = waiting[-1]
        parents = [one for one in by_shard[current].parent_shard_ids if one in by_shard]
        missing = [one for one in parents if one not in known and one not in waiting]
        if missing:
            waiting += missing
            continue
        known[current] = 1 + max((known.get(one, -1) for one in parents), default=-1)
        waiting.pop()
    return known[shard]


def _state(lease: Lease) -> str:
    if lease.ended:
        return "finished"
    return "no owner" if lease.actual_owner is None else "read"


def draw_shards(leases: Sequence[Lease], stream: str | None) -> str:
    """Draw the shards of a stream and return the figure as a data URI."""
    own = [lease for lease in leases if lease.stream == stream]
    shown = boxes(own)
    figure, (axes,) = new_figure(_HEIGHT_INCHES)
    entries = _draw_boxes(axes, shown)
    _draw_lines(axes, shown)
    _draw_numbers(axes, shown)
    hidden = len(own) - len(shown)
    name = "" if stream is None else f" of {':'.join(stream.split(':')[1:2]) or stream}"
    title = f"Shards{name}" + (f" ({hidden} not shown)" if hidden else "")
    name_axes(axes, title, "reshards", "share of the hash keys")
    generations = sorted({box.generation for box in shown}) or [0]
    axes.set_xticks(generations)
    axes.set_xlim(generations[0] - _WIDTH, generations[-1] + _WIDTH)
    axes.set_ylim(0, 1)
    add_legend(figure, entries, "outside right upper")
    return data_uri(figure)


def _draw_boxes(axes: "Axes", shown: Sequence[Box]) -> list[tuple["Artist", str]]:
    """Draw one path per state. An element per shard would make the image large."""
    from matplotlib.patches import PathPatch  # noqa: PLC0415
    from matplotlib.path import Path  # noqa: PLC0415

    entries: list[tuple[Artist, str]] = []
    for state, colour in _STATES.items():
        of_state = [box for box in shown if box.state == state]
        if not of_state:
            continue
        corners = []
        for box in of_state:
            left, right = box.generation - _WIDTH / 2, box.generation + _WIDTH / 2
            gap = min((box.high - box.low) / 10, _GAP)
            low, high = box.low + gap, box.high - gap
            corners.append([(left, low), (right, low), (right, high), (left, high)])
        path = Path.make_compound_path_from_polys(np.array(corners))
        patch = axes.add_patch(PathPatch(path, facecolor=colour, linewidth=0))
        entries.append((patch, f"{state} ({len(of_state)})"))
    return entries


def _draw_lines(axes: "Axes", shown: Sequence[Box]) -> None:
    by_shard = {box.lease.shard_id: box for box in shown}
    lines_x: list[float] = []
    lines_y: list[float] = []
    for box in shown:
        for parent_id in sorted(box.lease.parent_shard_ids):
            parent = by_shard.get(parent_id)
            if parent is not None:
                ends = (parent.generation + _WIDTH / 2, box.generation - _WIDTH / 2)
                lines_x += [*ends, math.nan]
                lines_y += [(parent.low + parent.high) / 2, (box.low + box.high) / 2, math.nan]
    axes.plot(lines_x, lines_y, color=TEXT, linewidth=0.8)


def _draw_numbers(axes: "Axes", shown: Sequence[Box]) -> None:
    for box in shown:
        if box.high - box.low >= _LABEL_SHARE:
            axes.text(
                box.generation,
                (box.low + box.high) / 2,
                plain(shard_text(box.lease.shard_id), 12),
                ha="center",
                va="center",
                fontsize=7,
                color="white",
            )
