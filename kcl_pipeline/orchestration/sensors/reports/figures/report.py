"""Decide when the figures of the fleet are drawn, and make their metadata."""

import logging
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import dagster as dg

from kcl_pipeline import extras
from kcl_pipeline.orchestration.sensors.reports.figures.drawing import image
from kcl_pipeline.orchestration.sensors.reports.figures.lag import LagHistory, draw_lag
from kcl_pipeline.orchestration.sensors.reports.figures.load import draw_load
from kcl_pipeline.orchestration.sensors.reports.figures.shards import draw_shards, stream_to_draw
from kcl_pipeline.orchestration.sensors.reports.fleet_view import FleetView
from kcl_pipeline.planning.explain import explain
from kcl_pipeline.planning.model import Plan, PlanInput

_log = logging.getLogger(__name__)

FIGURES_SECONDS: Final = 600.0
"""Longest time between two drawings. Each is one entry of three figures in an event.

A younger history is drawn when it has doubled: the first drawing has two points only.
"""
_FIRST_SAMPLES: Final = 2
FIRST_SECONDS: Final = 120.0
"""How long the first drawing waits for two observations with a known lag: workers are starting."""


@dataclass(slots=True)
class Figures:
    """What the figures show, and when they were drawn last. Can be built again at any time.

    Attributes:
        lags: The lag of each worker.
        plan: The last plan with moves; without one, the last plan.
        drawn_at: Monotonic seconds. None: not yet.
        drawn_wall: Epoch seconds.
        drawn_with_lag: Whether a lag was known then.
        drawn_gap: Seconds from then to the next drawing.
        stored_wall: Epoch seconds when the event of the figures was stored, and the next one was
            not. The daemon stores the events of a tick before the next tick, which takes seconds
            under load. None: no report since.
    """

    lags: LagHistory = field(default_factory=LagHistory)
    plan: tuple[PlanInput, Plan] | None = None
    drawn_at: float | None = None
    drawn_wall: float = 0.0
    drawn_with_lag: bool = False
    drawn_gap: float = FIGURES_SECONDS
    stored_wall: float | None = None

    def observe(self, view: FleetView) -> None:
        """Add one observation."""
        self.lags.observe(view.workers, view.wall_seconds)
        self._note_plan(view.plan, view.plan_input)

    def _note_plan(self, plan: Plan | None, plan_input: PlanInput | None) -> None:
        if plan is None or plan_input is None:
            return
        if plan.moves or self.plan is None or not self.plan[1].moves:
            self.plan = (plan_input, plan)

    def metadata(self, view: FleetView, key: dg.AssetKey, now: float) -> dict[str, Any]:
        """Return the figures if they are due, otherwise a link to the event that has them.

        Args:
            view: The observation.
            key: Asset key of the fleet.
            now: Monotonic seconds.
        """
        if not extras.is_installed("figures"):
            return {}
        if self.drawn_at is None and not self._is_worth_drawing():
            return {}
        # Without this, a figure without a lag stays for ten minutes after a slow start of workers.
        has_first_lag = self._has_lag() and not self.drawn_with_lag
        is_due = self.drawn_at is None or now - self.drawn_at >= self.drawn_gap
        if not is_due and not has_first_lag:
            if self.stored_wall is None:
                self.stored_wall = view.wall_seconds
            return {"figures": dg.MetadataValue.md(self._link(key, self.stored_wall))}
        self.drawn_at, self.drawn_wall, self.stored_wall = now, view.wall_seconds, None
        has_lag = self._has_lag()
        self.drawn_gap = min(self.lags.seconds, FIGURES_SECONDS) if has_lag else FIGURES_SECONDS
        self.drawn_with_lag = self.drawn_with_lag or has_lag
        try:
            return {"figures": dg.MetadataValue.md(self._draw(view))}
        except Exception:  # noqa: BLE001 (a figure must not stop the leader)
            _log.warning("cannot draw the figures of the fleet", exc_info=True)
            return {}

    def _has_lag(self) -> bool:
        return sum(bool(lags) for _, lags in self.lags.samples) >= _FIRST_SAMPLES

    def _is_worth_drawing(self) -> bool:
        return self._has_lag() or self.lags.seconds >= FIRST_SECONDS

    def _link(self, key: dg.AssetKey, stored_wall: float) -> str:
        time = f"{datetime.fromtimestamp(self.drawn_wall, UTC):%H:%M} UTC"
        millis = round(stored_wall * 1000)
        return f"[of {time}](/assets/{'/'.join(key.path)}?view=events&time={millis})"

    def _draw(self, view: FleetView) -> str:
        drawn = [image("Lag by worker", draw_lag(self.lags.series()))]
        if self.plan is not None:
            drawn.append(
                image("Load before and after the last plan", draw_load(explain(*self.plan)))
            )
        if view.leases:
            uri = draw_shards(view.leases, stream_to_draw(view.leases))
            drawn.append(image("Shards over reshards", uri))
        return "\n\n".join(drawn)
