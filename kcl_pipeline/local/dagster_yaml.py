"""Dagster instance settings for long-running workers on one machine."""

from pathlib import Path
from typing import Final

DAGSTER_YAML: Final = """\
telemetry:
  enabled: false
nux:
  enabled: false

# A leader's tick must not wait for another sensor's.
sensors:
  use_threads: true
  num_workers: 4
  num_submit_workers: 4

# Continuous workers occupy their places for as long as they run; the limit on their tag keeps
# places for everything else.
run_queue:
  dequeue_interval_seconds: 1
  max_concurrent_runs: 25
  tag_concurrency_limits:
    - key: kcl/mode
      value: continuous
      limit: 16

run_monitoring:
  enabled: true
  poll_interval_seconds: 30
  cancel_timeout_seconds: 180
  free_slots_after_run_end_seconds: 30

# A tick every five seconds is 17,000 a day.
retention:
  sensor:
    purge_after_days:
      skipped: 2
      success: 30
      failure: 30
      started: 30
"""


def write_dagster_yaml(home: Path) -> Path:
    """Write `dagster.yaml` into the directory `home` unless the file exists.

    The directory is created when it does not exist.

    Returns:
        The path of the file.
    """
    home.mkdir(parents=True, exist_ok=True)
    path = home / "dagster.yaml"
    if not path.exists():
        path.write_text(DAGSTER_YAML, encoding="utf-8")
    return path
