"""Check the run limit in `dagster.yaml`.

Only the file is read. Opening the instance would create its database, or need the password of it.
Dagster itself refuses a file with wrong values; here they count as missing.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from kcl_pipeline.cli.doctor.setup import ok, problem, unknown, warning
from kcl_pipeline.orchestration.options import FleetLike
from kcl_pipeline.status.findings import Finding

DEFAULT_RUN_LIMIT: Final = 10
RUN_LIMIT: Final = "run limit"
SECTIONS: Final = ("concurrency.runs", "run_queue", "run_coordinator.config")
"""Each of them may have the run limit. Dagster refuses a file with limits in two of them."""


def check_instance(home: str | None, fleet: FleetLike) -> Finding:
    """Check the instance in `DAGSTER_HOME`.

    Args:
        home: The folder. None: it is not set.
        fleet: The fleet of the pipeline.
    """
    if not home:
        text = "the run limit was not checked; set DAGSTER_HOME to check it"
        return unknown("dagster", text)
    path = Path(home) / "dagster.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return problem("dagster", f"{path} cannot be read: {error}", "correct the file")
    if content is not None and not isinstance(content, Mapping):
        return problem("dagster", f"{path} is not a mapping of settings", "correct the file")
    return check_run_limit(content or {}, fleet)


def check_run_limit(settings: Mapping[str, Any], fleet: FleetLike) -> Finding:
    """Check that workers, one more for a replacement, and one other run have a place."""
    limit = run_limit(settings)
    needed = fleet.max + 2
    if limit is None or limit >= needed:
        text = "none" if limit is None else f"max_concurrent_runs is {limit}"
        return ok(RUN_LIMIT, f"{text}; Fleet.max is {fleet.max}")
    section = next((name for name in SECTIONS if _at(settings, name)), SECTIONS[0])
    return warning(
        RUN_LIMIT,
        f"max_concurrent_runs is {limit}, and Fleet.max is {fleet.max}: workers may take all "
        "places, and other runs then wait for as long as they run, also a replacement, maintenance "
        "and the jobs of an operator",
        f"write {section}.max_concurrent_runs: {needed} or more into dagster.yaml, or a smaller "
        "Fleet; count the workers of all pipelines",
    )


def run_limit(settings: Mapping[str, Any]) -> int | None:
    """Return the largest number of runs in progress; None without a limit."""
    queued = "QueuedRunCoordinator"
    if (_at(settings, "run_coordinator.class") or queued) != queued:
        return None
    for section in SECTIONS:
        number = _number(_at(settings, f"{section}.max_concurrent_runs"))
        if number is not None:
            return None if number < 0 else int(number)
    return DEFAULT_RUN_LIMIT


def _at(settings: object, path: str) -> Any:
    """The value at a path of keys. None: it is missing."""
    for key in path.split("."):
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings


def _number(value: object) -> float | None:
    """A number, also as `{env: NAME}`. None: missing, or not a number."""
    if isinstance(value, Mapping):
        value = os.environ.get(str(value.get("env")))
    try:
        return None if value is None else float(str(value))
    except ValueError:
        return None
