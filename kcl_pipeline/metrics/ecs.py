"""CPU of a container on Amazon ECS, by the task metadata endpoint version 4 (protocol §11.3)."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from kcl_pipeline.metrics.provider import CPU, FULL_PERCENT, percent

HttpGet = Callable[[str], bytes]
"""Gives the body of a page. Raises `OSError` when it cannot be had."""

ENDPOINT_VARIABLE: Final = "ECS_CONTAINER_METADATA_URI_V4"
MINIMUM_SHARES: Final = 2
_TIMEOUT_SECONDS: Final = 0.5
_OK: Final = 200
_MAX_BODY_BYTES: Final = 4 * 1024 * 1024


def http_get(url: str) -> bytes:
    """One GET over plain HTTP, without proxies, half a second at most per step: it runs between
    lease renewals.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise OSError(f"{url!r} is not an http address")
    connection = http.client.HTTPConnection(
        parts.hostname, parts.port or 80, timeout=_TIMEOUT_SECONDS
    )
    try:
        connection.request("GET", parts.path or "/")
        answer = connection.getresponse()
        body = answer.read(_MAX_BODY_BYTES)
    except http.client.HTTPException as error:
        raise OSError(f"{url}: {error!r}") from error
    finally:
        connection.close()
    if answer.status != _OK:
        raise OSError(f"{url} answered {answer.status}")
    return body


def cores_used(stats: Mapping[str, Any]) -> float | None:
    """Cores in use between the two readings in an answer of `/stats`; None when it has only one
    reading, or no time passed between them.
    """
    now, before = stats["cpu_stats"], stats["precpu_stats"]
    used_before, system_before = (
        before["cpu_usage"]["total_usage"],
        before.get("system_cpu_usage", 0),
    )
    if not used_before and not system_before:
        return None
    used = now["cpu_usage"]["total_usage"] - used_before
    system = now["system_cpu_usage"] - system_before
    if used < 0 or system <= 0:
        return None
    return float(used / system * now["online_cpus"])


def container_cores(
    container: Mapping[str, Any], task: Mapping[str, Any], online_cpus: int
) -> float:
    """The part of the task's CPUs that belongs to this container: by its share among all containers
    of the task.

    The task's limit is in vCPU; a task without one may use the whole instance. A container without
    a share has Docker's minimum, so the sum is never 0.
    """
    task_cores = float(task.get("Limits", {}).get("CPU") or online_cpus)
    shares = {c["DockerId"]: _shares(c) for c in task["Containers"]}
    own = shares.get(container["DockerId"], MINIMUM_SHARES)
    return task_cores * own / (sum(shares.values()) or own)


def _shares(container: Mapping[str, Any]) -> float:
    return float(container.get("Limits", {}).get("CPU") or MINIMUM_SHARES)


class EcsCpu:
    """CPU of this container, of its part of the task; `base_url` is the value of
    `ECS_CONTAINER_METADATA_URI_V4`.
    """

    short_name = CPU
    max_utilization_percent = FULL_PERCENT

    def __init__(self, base_url: str, get: HttpGet = http_get) -> None:
        self._base_url = base_url.rstrip("/")
        self._get = get
        self._cores: float | None = None

    def sample(self) -> float | None:
        """Percent of the container's part.

        Raises `OSError` when the endpoint does not answer, `ValueError` or `KeyError` for another
        answer.
        """
        stats = self._json("/stats")
        used = cores_used(stats)
        if used is None:
            return None
        if self._cores is None:
            self._cores = container_cores(
                self._json(""), self._json("/task"), stats["cpu_stats"]["online_cpus"]
            )
        return percent(used, self._cores)

    def _json(self, path: str) -> Any:
        return json.loads(self._get(self._base_url + path))
