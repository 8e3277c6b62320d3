"""Check the settings of the Dagster instance: run limits, and grace periods of run launchers.

Only `dagster.yaml` is read. Opening the instance would create its database.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from kcl_pipeline.cli.doctor.finding import ok, problem, unknown, warning
from kcl_pipeline.orchestration.assets.contract import FleetLike
from kcl_pipeline.status.findings import Finding

DEFAULT_RUN_LIMIT: Final = 10
DEFAULT_CANCEL_SECONDS: Final = 180.0
K8S_TAG: Final = "dagster-k8s/config"
RUN_LIMIT: Final = "run limit"
GRACE: Final = "grace period"


@dataclass(frozen=True, slots=True)
class Grace:
    """The time between the signal that ends a worker and its kill.

    Attributes:
        seconds: The time. None: not known.
        setting: Where it is set.
        is_default: Whether the setting is missing.
    """

    seconds: float | None
    setting: str
    is_default: bool = False


def longest_stop_seconds(stop_timeout_millis: int) -> float:
    """Return how long a stop takes at most."""
    # Loaded here: `doctor -a` does not need the worker.
    from kcl_pipeline.worker.worker import STOP_SECONDS  # noqa: PLC0415

    return stop_timeout_millis / 1000 + STOP_SECONDS


def read_settings(home: Path) -> Mapping[str, Any]:
    """Read `dagster.yaml`. A missing file has no settings.

    Raises:
        ValueError: It cannot be read.
    """
    path = home / "dagster.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if content is not None and not isinstance(content, Mapping):
        raise ValueError(f"{path} is not a mapping of settings")
    return content or {}


def check_run_limits(
    settings: Mapping[str, Any], fleet: FleetLike, tag_limits: Sequence[tuple[str, int]]
) -> Iterator[Finding]:
    """Check that workers, one more for a replacement, and one other run have a place.

    Args:
        settings: The content of `dagster.yaml`.
        fleet: The fleet of the pipeline.
        tag_limits: The tag limits that apply to a worker: the tag, and the number of runs.
    """
    limit = run_limit(settings)
    found = True
    if limit is not None and limit < fleet.max + 2:
        found = False
        yield warning(
            RUN_LIMIT,
            _limit_text(limit, fleet),
            f"write {limit_setting(settings)}: {fleet.max + 2} or more into dagster.yaml, or a "
            "smaller Fleet; count the workers of all pipelines",
        )
    for tag, number in tag_limits:
        if number < fleet.max + 1:
            found = False
            yield warning(
                RUN_LIMIT,
                f"the tag limit of {tag} is {number}, and Fleet.max is {fleet.max}: further runs "
                "of workers wait in the queue, also the one that replaces a worker",
                f"write a limit of {fleet.max + 1} or more into dagster.yaml, or a smaller Fleet; "
                "count the workers of all pipelines",
            )
    if found:
        text = "none" if limit is None else f"max_concurrent_runs is {limit}"
        yield ok(RUN_LIMIT, f"{text}; Fleet.max is {fleet.max}")


def _limit_text(limit: int, fleet: FleetLike) -> str:
    """Say what a run limit does that has no place for all workers and other runs."""
    size = f"Fleet.min is {fleet.min}" if limit < fleet.min + 1 else f"Fleet.max is {fleet.max}"
    return (
        f"max_concurrent_runs is {limit}, and {size}: workers may take all places, and other runs "
        "then wait for as long as they run, also a replacement, maintenance and the jobs of an "
        "operator"
    )


def run_limit(settings: Mapping[str, Any]) -> int | None:
    """Return the largest number of runs in progress; None without a limit."""
    coordinator = _section(settings, "run_coordinator")
    if coordinator.get("class", "QueuedRunCoordinator") != "QueuedRunCoordinator":
        return None
    for place in _places(settings).values():
        number = _number(place.get("max_concurrent_runs"))
        if number is not None:
            return None if number < 0 else int(number)
    return DEFAULT_RUN_LIMIT


def _places(settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The sections that may have the limits of the run queue."""
    names = ("concurrency.runs", "run_queue", "run_coordinator.config")
    return {name: _section(settings, *name.split(".")) for name in names}


def limit_setting(settings: Mapping[str, Any]) -> str:
    """Return where the run limit is set. Dagster refuses a file with limits in two sections."""
    set_in = (name for name, section in _places(settings).items() if section)
    place = next(set_in, "concurrency.runs")
    return f"{place}.max_concurrent_runs"


def tag_limits(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the limits of the run queue for tags."""
    for place in _places(settings).values():
        found = place.get("tag_concurrency_limits")
        if found and isinstance(found, list):
            return [one for one in found if isinstance(one, Mapping)]
    return []


def check_grace(
    settings: Mapping[str, Any],
    fleet: FleetLike,
    stop_seconds: float,
) -> Iterator[Finding]:
    """Check that a worker is not killed before it has stopped.

    Args:
        settings: The content of `dagster.yaml`.
        fleet: The fleet of the pipeline.
        stop_seconds: The longest stop.
    """
    needed = math.ceil(stop_seconds)
    takes = f"a stop takes up to {stop_seconds:.0f} s (worker.stop_timeout_millis)"
    grace = grace_of(settings, fleet)
    if grace is None:
        yield ok(GRACE, "Dagster's launcher of local processes does not kill workers")
        return
    if grace.seconds is None:
        yield unknown(GRACE, f"not known: {grace.setting}; {takes}")
        return
    is_short = grace.seconds < needed
    if is_short:
        source = f"the default of {grace.setting}" if grace.is_default else grace.setting
        yield warning(
            GRACE,
            f"{grace.seconds:g} s ({source}), but {takes}; a worker that is killed earlier loses "
            "nothing, but its leases wait for the failover time",
            f"set {grace.setting} to {max(30, math.ceil(needed / 10) * 10)}",
        )
    cancel = _number(_at(settings, "run_monitoring", "cancel_timeout_seconds"))
    cancel = DEFAULT_CANCEL_SECONDS if cancel is None else cancel
    if cancel <= grace.seconds:
        yield warning(
            GRACE,
            f"run_monitoring.cancel_timeout_seconds is {cancel:g}, not above the grace period of "
            f"{grace.seconds:g} s: Dagster reports a run as canceled while its worker stops",
            f"set it to {math.ceil(grace.seconds * 1.5)} in dagster.yaml",
        )
    elif not is_short:
        yield ok(GRACE, f"{grace.seconds:g} s ({grace.setting}); {takes}")


def grace_of(settings: Mapping[str, Any], fleet: FleetLike) -> Grace | None:
    """Return the grace period of the run launcher; None if it never kills."""
    launcher = _section(settings, "run_launcher")
    name = str(launcher.get("class", "DefaultRunLauncher"))
    config = _section(launcher, "config")
    if name == "DefaultRunLauncher":
        return None
    if name == "K8sRunLauncher":
        setting = "termination_grace_period_seconds"
        tag = _pod_grace(_json(fleet.run_tags.get(K8S_TAG)))
        own = _pod_grace(_section(config, "run_k8s_config")) if tag is None else tag
        return Grace(30.0 if own is None else own, setting, is_default=own is None)
    if name == "DockerRunLauncher":
        own = _number(_at(config, "container_kwargs", "stop_timeout"))
        return Grace(10.0 if own is None else own, "container_kwargs.stop_timeout", own is None)
    if name == "EcsRunLauncher":
        task = config.get("task_definition")
        if isinstance(task, str) or (isinstance(task, Mapping) and "env" in task):
            return Grace(None, "it is stopTimeout of the task definition, which is not read")
        return Grace(30.0, "stopTimeout in a task definition of your own", is_default=True)
    return Grace(None, f"the run launcher {name} is not known here")


def _pod_grace(config: Mapping[str, Any]) -> float | None:
    pod = _section(config, "pod_spec_config")
    for key in ("termination_grace_period_seconds", "terminationGracePeriodSeconds"):
        if (found := _number(pod.get(key))) is not None:
            return found
    return None


def _json(text: str | None) -> Mapping[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, Mapping) else {}


def _at(settings: Mapping[str, Any], *keys: str) -> Any:
    found: Any = settings
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _section(settings: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """A group of settings; empty if it is missing, or no group."""
    found = _at(settings, *keys)
    return found if isinstance(found, Mapping) else {}


def _number(value: object) -> float | None:
    """A number, also as `{env: NAME}`. None: missing, or not a number."""
    if isinstance(value, Mapping):
        value = os.environ.get(str(value.get("env")))
    try:
        return None if value is None else float(str(value))
    except ValueError:
        return None


def check_instance(
    home: str | None,
    fleet: FleetLike,
    tag_limits_of: Callable[[Sequence[Mapping[str, Any]]], Sequence[tuple[str, int]]],
    stop_seconds: float,
) -> Iterator[Finding]:
    """Check the instance in `DAGSTER_HOME`.

    Args:
        home: The folder. None: it is not set.
        fleet: The fleet of the pipeline.
        tag_limits_of: Selects the limits that apply to a worker: the tag, and the number of runs.
        stop_seconds: The longest stop.
    """
    if not home:
        text = "run limits and grace period were not checked; set DAGSTER_HOME to check them"
        yield unknown("dagster", text)
        return
    try:
        settings = read_settings(Path(home))
    except ValueError as error:
        yield problem("dagster", str(error), "correct the file")
        return
    yield from check_run_limits(settings, fleet, tag_limits_of(tag_limits(settings)))
    yield from check_grace(settings, fleet, stop_seconds)
