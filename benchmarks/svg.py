"""Line chart as SVG without dependencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 640, 320, 52, 40, 16, 40
_COLOURS = ("#b0b0b0", "#d95f02", "#1b6ca8", "#4d9221")


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Sequence[float]],
    *,
    most: float,
    marks: Sequence[float] = (),
) -> str:
    """Return a chart with one line per series over equally spaced x values.

    Values above `most` are clipped. `marks` are dashed horizontal lines.
    """
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def y(value: float) -> float:
        return _TOP + height * (1 - min(value, most) / most)

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            'font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="14">{title}</text>',
        (
            f'<text x="{_LEFT + width / 2:.0f}" y="{_HEIGHT - 8}" '
            f'text-anchor="middle">{x_label}</text>'
        ),
        (
            f'<text x="14" y="{_TOP + height / 2:.0f}" text-anchor="middle" '
            f'transform="rotate(-90 14 {_TOP + height / 2:.0f})">{y_label}</text>'
        ),
        (
            f'<rect x="{_LEFT}" y="{_TOP}" width="{width}" height="{height}" fill="none" '
            'stroke="#888"/>'
        ),
    ]
    steps = 5
    for k in range(steps + 1):
        value = most * k / steps
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.1f}</text>'
        )
    parts.extend(
        f'<line x1="{_LEFT}" x2="{_LEFT + width}" y1="{y(mark):.1f}" y2="{y(mark):.1f}" '
        'stroke="#888" stroke-dasharray="4 3"/>'
        for mark in marks
    )
    for k, (name, values) in enumerate(series.items()):
        colour = _COLOURS[k % len(_COLOURS)]
        every = max(len(values) // 160, 1)
        kept = [i for i in range(len(values)) if i % every == 0 or i == len(values) - 1]
        points = " ".join(
            f"{_LEFT + width * i / max(len(values) - 1, 1):.1f},{y(values[i]):.1f}" for i in kept
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        )
        parts.append(
            f'<text x="{_LEFT + width * (k + 0.5) / len(series):.0f}" y="34" '
            f'text-anchor="middle" fill="{colour}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
