"""The leader sensor of `benchmarks.failover_pipeline`, without a Dagster daemon.

Evaluates the sensor's function as often as a daemon does at best: ticks begin 5 s apart. The runs
that it requests are not started, because the benchmark starts the workers.
"""

from __future__ import annotations

from typing import Final

import dagster as dg

from benchmarks.failover_pipeline import NAME, failover
from kcl_pipeline.clock import SystemClock

TICK_SECONDS: Final = 5.0


def main() -> None:
    """Evaluate ticks until the process is ended."""
    clock, cursor = SystemClock(), None
    defs = failover.definitions()
    sensor = defs.resolve_sensor_def(f"{NAME.replace('-', '_')}_leader")
    failover.ensure_tables()
    with dg.DagsterInstance.ephemeral() as instance:
        while True:
            began = clock.monotonic()
            with dg.build_sensor_context(
                instance=instance,
                cursor=cursor,
                definitions=defs,
                resources=dict(defs.resources or {}),
                sensor_name=sensor.name,
                repository_name="failover",
            ) as context:
                cursor = sensor.evaluate_tick(context).cursor
            print(cursor, flush=True)
            clock.sleep(max(began + TICK_SECONDS - clock.monotonic(), 0.0))


if __name__ == "__main__":
    main()
