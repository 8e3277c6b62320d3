"""Style of the figures, and their form in Markdown.

The Dagster UI is light or dark, and an image does not know which. So the background is transparent,
and every colour has a contrast of at least 3 on both.
"""

import base64
import re
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import quote

from kcl_pipeline.text import printable

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BYTES: Final = 40_000
"""Largest size of a figure in an event, as a data URI."""

TEXT: Final = "#7d8590"
COLOURS: Final = (
    "#3b82f6",
    "#d9651f",
    "#1a9e6f",
    "#c24fb0",
    "#a67c00",
    "#e0484f",
    "#2a93a8",
)
"""Colours of series, which can be told apart with common forms of colour blindness."""
OTHERS: Final = "#8a8f98"
_WIDTH_INCHES: Final = 9.6
_SALT: Final = "kcl-pipeline"
_NO_METADATA: Final = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_MANY_DECIMALS: Final = re.compile(rb"(\d\.\d)\d{3,}")
"""Coordinates. They make up half of an SVG, and a tenth of a point is not visible."""


def new_figure(height_inches: float, panels: int = 1) -> tuple["Figure", list["Axes"]]:
    """Return an empty figure with panels side by side."""
    # An extra; and its import takes a second.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
    figure.patch.set_alpha(0.0)
    found = [figure.add_subplot(1, panels, number + 1) for number in range(panels)]
    for axes in found:
        axes.patch.set_alpha(0.0)
        axes.tick_params(colors=TEXT, labelsize=8)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(TEXT)
    return figure, found


def name_axes(axes: "Axes", title: str, x: str, y: str) -> None:
    """Write the title and the names of both axes."""
    axes.set_title(plain(title), color=TEXT, fontsize=10, loc="left")
    axes.set_xlabel(plain(x), color=TEXT, fontsize=8)
    axes.set_ylabel(plain(y), color=TEXT, fontsize=8)


def add_legend(
    figure: "Figure",
    entries: Sequence[tuple["Artist", str]],
    place: Literal["outside right upper", "outside upper right"],
    columns: int = 1,
) -> None:
    """Write the legend next to the panels.

    The labels are not those of matplotlib, which leaves out names that begin with an underscore.
    """
    if entries:
        figure.legend(
            [artist for artist, _ in entries],
            [label for _, label in entries],
            loc=place,
            ncols=columns,
            fontsize=8,
            labelcolor=TEXT,
            frameon=False,
        )


def plain(text: str, most: int = 60) -> str:
    """Return text of other parties without line breaks and without formulas, cut to a length."""
    return printable(text, most).replace("$", r"\$")


def data_uri(figure: "Figure") -> str:
    """Return the figure as a data URI of at most `MAX_BYTES`.

    It is an SVG, which is sharp at every size, or a PNG if the SVG is too large.

    Raises:
        ValueError: Both are too large.
    """
    import matplotlib as mpl  # noqa: PLC0415

    out = BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": _SALT}):
        figure.savefig(out, format="svg", transparent=True, metadata=_NO_METADATA)
    short = _MANY_DECIMALS.sub(rb"\1", out.getvalue()).replace(b"\n", b" ")
    svg = "data:image/svg+xml;base64," + base64.b64encode(short).decode()
    if len(svg) <= MAX_BYTES:
        return svg
    for dots_per_inch in (80, 50, 30):
        out = BytesIO()
        figure.savefig(out, format="png", transparent=True, dpi=dots_per_inch)
        png = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
        if len(png) <= MAX_BYTES:
            return png
    raise ValueError(f"the figure has more than {MAX_BYTES} bytes")


def image(title: str, uri: str) -> str:
    """Return a figure as Markdown."""
    return f"![{quote(title, safe=' ,')}]({uri})"
