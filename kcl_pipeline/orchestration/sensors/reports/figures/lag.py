"""Draw the lag over time by worker."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from kcl_pipeline.leases.tables import WorkerMetrics
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

WINDOW_SECONDS: Final = 3 * 3_600.0
SAMPLE_SECONDS: Final = 20.0
MAX_POINTS: Final = 60
NO_LAG: Final = "no lag is known yet"
_TICKS: Final = 7
_MINUTE_SECONDS: Final = 60.0


@dataclass(slots=True)
class LagHistory:
    """The lag of each worker in the last three hours. A reload of the code begins it again.

    Attributes:
        samples: Epoch seconds, and the lag by worker in seconds. At most one per 20 s.
    """

    samples: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)

    @property
    def seconds(self) -> float:
        """How long the history is."""
        return self.samples[-1][0] - self.samples[0][0] if self.samples else 0.0

    def observe(self, workers: Sequence[WorkerMetrics], wall_seconds: float) -> None:
        """Add one observation, unless the last one is too young."""
        if self.samples and 0 <= wall_seconds - self.samples[-1][0] < SAMPLE_SECONDS:
            return
        lags = {
            worker.worker_id: worker.status.lag_millis / 1000
            for worker in workers
            if worker.status is not None and worker.status.lag_millis is not None
        }
        self.samples.append((wall_seconds, lags))
        while self.samples[0][0] < wall_seconds - WINDOW_SECONDS:
            self.samples.popleft()

    def series(self) -> dict[str, list[tuple[float, float]]]:
        """Return the lines: the workers with the largest lags, then the largest of the others.

        A line has at most `MAX_POINTS` points. A point is the largest lag in its part of the time.
        """
        if not self.samples:
            return {}
        began, ended = self.samples[0][0], self.samples[-1][0]
        width = max((ended - began) / MAX_POINTS, SAMPLE_SECONDS)
        parts: dict[str, dict[int, float]] = {}
        for at, lags in self.samples:
            part = min(int((at - began) / width), MAX_POINTS - 1)
            for worker, lag in lags.items():
                line = parts.setdefault(worker, {})
                line[part] = max(lag, line.get(part, 0.0))
        worst = sorted(parts, key=lambda worker: (-max(parts[worker].values()), worker))
        shown = {worker: parts[worker] for worker in worst[: len(COLOURS)]}
        rest: dict[int, float] = {}
        for worker in worst[len(COLOURS) :]:
            for part, lag in parts[worker].items():
                rest[part] = max(lag, rest.get(part, 0.0))
        if rest:
            count = len(worst) - len(COLOURS)
            shown[f"{count} other workers"] = rest
        return {
            name: [(began + part * width, line[part]) for part in sorted(line)]
            for name, line in shown.items()
        }


def draw_lag(series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draw the lines of a `LagHistory` and return the figure as a data URI."""
    figure, (axes,) = new_figure(2.8)
    entries = []
    for number, (name, line) in enumerate(series.items()):
        (drawn,) = axes.plot(
            [at for at, _ in line],
            [lag for _, lag in line],
            color=COLOURS[number] if number < len(COLOURS) else OTHERS,
            linewidth=1.6,
            marker="o" if len(line) == 1 else "",
        )
        entries.append((drawn, plain(name, 40)))
    name_axes(axes, "Lag by worker", "time (UTC)", "seconds")
    times = [at for line in series.values() for at, _ in line]
    began, ended = min(times, default=0.0), max(times, default=0.0)
    step = (ended - began) / (_TICKS - 1)
    marks = [began + number * step for number in range(_TICKS)] if step else [began]
    form = "%H:%M" if step >= _MINUTE_SECONDS else "%H:%M:%S"
    if not times:
        marks = []
        axes.text(0.5, 0.5, NO_LAG, transform=axes.transAxes, ha="center", color=TEXT)
    axes.set_xticks(marks, [datetime.fromtimestamp(at, UTC).strftime(form) for at in marks])
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, axis="y", color=TEXT, alpha=0.3, linewidth=0.6)
    add_legend(figure, entries, "outside right upper")
    return data_uri(figure)
