"""Check `dagster.yaml`: the run limit, and the grace period of the run launcher.

Only the file is read. Opening the instance would create its database, or need the password of it.
Dagster itself refuses a file with wrong values; here they count as missing.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from kcl_pipeline.cli.doctor.setup import ok, problem, unknown, warning
from kcl_pipeline.orchestration.options import FleetLike
from kcl_pipeline.status.findings import Finding

DEFAULT_RUN_LIMIT: Final = 10
RUN_LIMIT: Final = "run limit"
GRACE: Final = "grace period"
SECTIONS: Final = ("concurrency.runs", "run_queue", "run_coordinator.config")
"""Each of them may have the run limit. Dagster refuses a file with limits in two of them."""
_POD: Final = "pod_spec_config.termination_grace_period_seconds"
_POD_CAMEL: Final = "pod_spec_config.terminationGracePeriodSeconds"


def longest_stop_seconds(stop_timeout_millis: int) -> float:
    """Return how long a stop takes at most."""
    # Loaded here: `doctor -a` does not need the worker.
    from kcl_pipeline.worker.worker import STOP_SECONDS  # noqa: PLC0415

    return stop_timeout_millis / 1000 + STOP_SECONDS


def check_instance(home: str | None, fleet: FleetLike, stop_seconds: float) -> Iterator[Finding]:
    """Check the instance in `DAGSTER_HOME`.

    Args:
        home: The folder. None: it is not set.
        fleet: The fleet of the pipeline.
        stop_seconds: The longest stop of a worker.
    """
    if not home:
        text = "run limit and grace period were not checked; set DAGSTER_HOME to check them"
        yield unknown("dagster", text)
        return
    path = Path(home) / "dagster.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        yield problem("dagster", f"{path} cannot be read: {error}", "correct the file")
        return
    if content is not None and not isinstance(content, Mapping):
        yield problem("dagster", f"{path} is not a mapping of settings", "correct the file")
        return
    yield check_run_limit(content or {}, fleet)
    yield check_grace(content or {}, fleet, stop_seconds)


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


def check_grace(settings: Mapping[str, Any], fleet: FleetLike, stop_seconds: float) -> Finding:
    """Check that a worker is not killed before it has stopped."""
    launcher = str(_at(settings, "run_launcher.class") or "DefaultRunLauncher")
    config = _at(settings, "run_launcher.config")
    config = config if isinstance(config, Mapping) else {}
    takes = f"a stop takes up to {stop_seconds:.0f} s (worker.stop_timeout_millis)"
    if launcher == "DefaultRunLauncher":
        return ok(GRACE, "Dagster's launcher of local processes does not kill workers")
    if launcher == "K8sRunLauncher":
        setting, default = "termination_grace_period_seconds", 30.0
        tag = _json(fleet.run_tags.get("dagster-k8s/config"))
        values = [_at(tag, _POD), _at(tag, _POD_CAMEL)]
        values += [_at(config, f"run_k8s_config.{name}") for name in (_POD, _POD_CAMEL)]
    elif launcher == "DockerRunLauncher":
        setting, default = "container_kwargs.stop_timeout", 10.0
        values = [_at(config, setting)]
    elif launcher == "EcsRunLauncher" and not _names_task(config.get("task_definition")):
        setting, default = "stopTimeout in a task definition of your own", 30.0
        values = []
    else:
        return unknown(GRACE, f"not known: the settings of {launcher} do not say it; {takes}")
    seconds = next((found for one in values if (found := _number(one)) is not None), None)
    grace = default if seconds is None else seconds
    needed = math.ceil(stop_seconds)
    if grace >= needed:
        return ok(GRACE, f"{grace:g} s ({setting}); {takes}")
    source = f"the default of {setting}" if seconds is None else setting
    return warning(
        GRACE,
        f"{grace:g} s ({source}), but {takes}; a worker that is killed earlier loses nothing, but "
        "its leases wait for the failover time",
        f"set {setting} to {max(30, math.ceil(needed / 10) * 10)}",
    )


def _names_task(task: object) -> bool:
    """Whether the launcher uses a task definition of the user, which is not in the file."""
    return isinstance(task, str) or (isinstance(task, Mapping) and "env" in task)


def _at(settings: object, path: str) -> Any:
    """The value at a path of keys. None: it is missing."""
    for key in path.split("."):
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings


def _json(text: str | None) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}


def _number(value: object) -> float | None:
    """A number, also as `{env: NAME}`. None: missing, or not a number."""
    if isinstance(value, Mapping):
        value = os.environ.get(str(value.get("env")))
    try:
        return None if value is None else float(str(value))
    except ValueError:
        return None
