"""Everything that `dagster dev` and `dg dev` load in this folder."""

import dagster as dg

import resources
import sensors
from assets import orders, revenue, telemetry

defs = dg.Definitions.merge(
    resources.defs,
    orders.defs,
    telemetry.defs,
    sensors.defs,
    # One process per run: it starts faster, and no step outlives its run.
    dg.Definitions(assets=[revenue.revenue_per_minute], executor=dg.in_process_executor),
)
