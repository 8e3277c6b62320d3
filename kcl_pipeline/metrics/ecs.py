"""Measure the CPU of an Amazon ECS container by the task metadata endpoint 4 (protocol §11.3)."""

import http.client
import json
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from kcl_pipeline.metrics.provider import CPU, FULL_PERCENT, percent

HttpGet = Callable[[str], bytes]
"""Returns the body of a URL. Raises `OSError` if the request fails."""

ENDPOINT_VARIABLE: Final = "ECS_CONTAINER_METADATA_URI_V4"
MINIMUM_SHARES: Final = 2
_TIMEOUT_SECONDS: Final = 0.5
_OK: Final = 200
_MAX_BODY_BYTES: Final = 4 * 1024 * 1024


def http_get(url: str) -> bytes:
    """Send one GET request over plain HTTP without proxies.

    Each step may take half a second, because the request runs between lease renewals.

    Raises:
        OSError: The request failed.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise OSError(f"{url!r} is not an http URL")
    connection = http.client.HTTPConnection(
        parts.hostname, parts.port or 80, timeout=_TIMEOUT_SECONDS
    )
    try:
        connection.request("GET", parts.path or "/")
        response = connection.getresponse()
        body = response.read(_MAX_BODY_BYTES)
    except http.client.HTTPException as error:
        raise OSError(f"{url}: {error!r}") from error
    finally:
        connection.close()
    if response.status != _OK:
        raise OSError(f"{url} returned status {response.status}")
    return body


def cores_used(stats: Mapping[str, Any]) -> float | None:
    """Cores used between the two readings in a response of `/stats`.

    None if it has only one reading, or if no time passed between the two.
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
    """The cores of the task that belong to this container, by its share in the task.

    The task's limit is in vCPU. A task without a limit may use the whole instance. A container
    without a share has Docker's minimum, so that the sum is never 0.
    """
    task_cores = float(task.get("Limits", {}).get("CPU") or online_cpus)
    shares = {c["DockerId"]: _shares(c) for c in task["Containers"]}
    own = shares.get(container["DockerId"], MINIMUM_SHARES)
    return task_cores * own / (sum(shares.values()) or own)


def _shares(container: Mapping[str, Any]) -> float:
    return float(container.get("Limits", {}).get("CPU") or MINIMUM_SHARES)


class EcsCpu:
    """CPU of this container, in percent of its part of the task.

    Args:
        base_url: The value of `ECS_CONTAINER_METADATA_URI_V4`.
        get: Sends a GET request.
    """

    short_name = CPU
    max_utilization_percent = FULL_PERCENT

    def __init__(self, base_url: str, get: HttpGet = http_get) -> None:
        self._base_url = base_url.rstrip("/")
        self._get = get
        self._cores: float | None = None

    def sample(self) -> float | None:
        """Percent of the container's part; None without two readings.

        Raises:
            OSError: The endpoint does not respond.
            ValueError: The response cannot be parsed.
            KeyError: The response has no CPU values.
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
