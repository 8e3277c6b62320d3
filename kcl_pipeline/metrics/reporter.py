"""Measure the CPU of a worker (protocol §11), and report it in its worker metrics row (§2.2, §2.3).

The CPU is that of the machine, of the container, or of the worker's own processes.
`MetricProvider` is the interface of a source. `select_provider` selects the source of this worker:
the task metadata endpoint of Amazon ECS, the control group (version 1 or 2), or /proc/stat.
`WorkerMetricsReporter` captures its values, and reports their averages.
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import os
import posixpath
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import psutil

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import WorkerSettings
from kcl_pipeline.errors import WorkerIdTakenError
from kcl_pipeline.events import CpuSourceSkipped, EventSink, ignore_events
from kcl_pipeline.leases.workers import WorkerMetrics, WorkerMetricsTable
from kcl_pipeline.text import printable
from kcl_pipeline.worker_status import WorkerStatus

ReadText = Callable[[str], str]
"""Returns the text of a file. Raises `OSError` if it cannot be read."""

CPU: Final = "C"
OWN_CPU: Final = "kclpCpu"
"""Name of the CPU metric on a platform where a Java worker reports none."""
FULL_PERCENT: Final = 100


class MetricProvider(Protocol):
    """One utilization metric of this worker (protocol §11).

    Attributes:
        short_name: Name in the worker metrics row: C, M, NI, NO, T, or `OWN_CPU`.
        max_utilization_percent: Upper end of the operating range, 1 to 100.
    """

    short_name: str
    max_utilization_percent: int

    def sample(self) -> float | None:
        """Percent since the last call, 0 to 100 inclusive.

        None without an earlier call, or if no time has passed. Any exception counts as a failed
        capture.
        """


def read_text(path: str) -> str:
    """Read the text of a file."""
    return Path(path).read_text(encoding="ascii", errors="replace")


def percent(used: float, available: float) -> float | None:
    """`used` in percent of `available`, at most 100.

    None if nothing was available or a counter decreased.
    """
    if available <= 0 or used < 0:
        return None
    return min(used / available * FULL_PERCENT, float(FULL_PERCENT))


class ProcessCpu:
    """Percent of the machine that this process and its descendants use.

    When a descendant ends, the sum of the CPU times decreases. A decrease counts as 0.
    """

    short_name = OWN_CPU
    max_utilization_percent = FULL_PERCENT

    def __init__(self, clock: Clock, cores: int) -> None:
        self._clock = clock
        self._cores = cores
        self._process = psutil.Process()
        self._before: tuple[float, float] | None = None

    def sample(self) -> float | None:
        """Percent of all cores since the last call; None at the first call.

        Raises:
            psutil.Error: The process cannot be read.
        """
        now = (self._clock.monotonic(), self._used_seconds())
        before, self._before = self._before, now
        if before is None:
            return None
        return percent(max(now[1] - before[1], 0.0), (now[0] - before[0]) * self._cores)

    def _used_seconds(self) -> float:
        used = _seconds(self._process)
        for child in self._process.children(recursive=True):
            try:
                used += _seconds(child)
            except psutil.NoSuchProcess:
                continue
        return used


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


ROOT: Final = "/sys/fs/cgroup"
OWN_GROUPS: Final = "/proc/self/cgroup"
_PAIR: Final = 2


def parse_cpu_set(text: str) -> int:
    """Count the CPUs in a list such as "0-4,6,8-10" (here 9).

    Raises:
        ValueError: The text is not a CPU list.
    """
    count = 0
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        size = int(last or first) - int(first) + 1
        if size < 1:
            raise ValueError(f"{text!r} is not a list of CPUs")
        count += size
    return count


def parse_cpu_max(text: str) -> float | None:
    """Number of cores that `cpu.max` allows; None for "max"."""
    quota, period = text.split()[:_PAIR]
    return None if quota == "max" else _cores(float(quota), float(period))


def parse_cfs_quota(quota: str, period: str) -> float | None:
    """Number of cores that `cpu.cfs_quota_us` and `cpu.cfs_period_us` allow; None without limit."""
    return None if int(quota) < 0 else _cores(float(quota), float(period))


def _cores(quota: float, period: float) -> float:
    if quota <= 0 or period <= 0:
        raise ValueError(f"a CPU quota of {quota:g} per {period:g} microseconds is not valid")
    return quota / period


def parse_usage_usec(text: str) -> float:
    """CPU seconds used, from `cpu.stat` of version 2.

    Raises:
        ValueError: The text has no `usage_usec`.
    """
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "usage_usec":
            return int(value) / 1e6
    raise ValueError(f"cpu.stat has no usage_usec: {text[:80]!r}")


def own_group(text: str, controller: str) -> str:
    """The path of this process's group in /proc/self/cgroup; "/" if it is not listed.

    The controller of version 2 is "".
    """
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return path or "/"
    return "/"


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """The CPU limits of a group, in cores.

    Attributes:
        quota_cores: Limit by quota; None without one.
        set_cores: Number of CPUs that the group may run on; None without a CPU set.
    """

    quota_cores: float | None
    set_cores: int | None

    def cores(self, machine_cores: int) -> float:
        """The smaller of the two limits; the whole machine without a limit."""
        return min(
            self.quota_cores or machine_cores, self.set_cores or machine_cores, machine_cores
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Functions that read one control group.

    Both raise `OSError` or `ValueError` if the group cannot be read.

    Attributes:
        used_seconds: Returns the CPU seconds used.
        limit: Returns the CPU limits.
    """

    used_seconds: Callable[[], float]
    limit: Callable[[], CpuLimit]


def group_v2(read: ReadText) -> Group:
    """The group of this process in version 2, which has one hierarchy.

    If its path does not exist, the root of the mount is used. Inside a container the root is the
    container's own group.
    """
    folders = _folders(read, ROOT, "")

    def limit() -> CpuLimit:
        maximum = _first_text(read, folders, ["cpu.max"])
        cpus = _first_text(read, folders, ["cpuset.cpus.effective"])
        return CpuLimit(
            parse_cpu_max(maximum) if maximum else None,
            parse_cpu_set(cpus) if cpus and cpus.strip() else None,
        )

    return Group(lambda: parse_usage_usec(_require_text(read, folders, ["cpu.stat"])), limit)


def group_v1(read: ReadText) -> Group:
    """The group of this process in version 1, which has one hierarchy per controller.

    The controllers may be mounted separately or together.
    """
    usage = [
        folder
        for name in ("cpu", "cpuacct", "cpu,cpuacct")
        for folder in _folders(read, f"{ROOT}/{name}", "cpuacct")
    ]
    quota = [
        folder
        for name in ("cpu", "cpu,cpuacct")
        for folder in _folders(read, f"{ROOT}/{name}", "cpu")
    ]
    cpuset = _folders(read, f"{ROOT}/cpuset", "cpuset")

    def limit() -> CpuLimit:
        micros, period = (
            _first_text(read, quota, [name]) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        )
        cpus = _first_text(read, cpuset, ["cpuset.effective_cpus", "cpuset.cpus"])
        return CpuLimit(
            parse_cfs_quota(micros, period) if micros and period else None,
            parse_cpu_set(cpus) if cpus and cpus.strip() else None,
        )

    return Group(lambda: int(_require_text(read, usage, ["cpuacct.usage"])) / 1e9, limit)


def _folders(read: ReadText, mount: str, controller: str) -> list[str]:
    try:
        path = own_group(read(OWN_GROUPS), controller)
    except OSError:
        path = "/"
    return [mount] if path == "/" else [posixpath.join(mount, path.lstrip("/")), mount]


def _first_text(read: ReadText, folders: Sequence[str], names: Sequence[str]) -> str | None:
    for folder in folders:
        for name in names:
            try:
                return read(posixpath.join(folder, name))
            except OSError:
                continue
    return None


def _require_text(read: ReadText, folders: Sequence[str], names: Sequence[str]) -> str:
    text = _first_text(read, folders, names)
    if text is None:
        raise FileNotFoundError(f"none of {list(names)} can be read in {list(folders)}")
    return text


class GroupCpu:
    """CPU that a control group used, in percent of its limit.

    The limit is read with every sample, because it may change while the worker runs.
    """

    max_utilization_percent = FULL_PERCENT

    def __init__(
        self, group: Group, clock: Clock, machine_cores: int, short_name: str = CPU
    ) -> None:
        self.short_name = short_name
        self._group = group
        self._clock = clock
        self._machine_cores = machine_cores
        self._before: tuple[float, float] | None = None

    def sample(self) -> float | None:
        """Percent of the limit used since the last call; None at the first call.

        Raises:
            OSError: The group cannot be read.
            ValueError: A file of the group cannot be parsed.
        """
        used, now = self._group.used_seconds(), self._clock.monotonic()
        before, self._before = self._before, (used, now)
        if before is None:
            return None
        return percent(
            used - before[0], (now - before[1]) * self._group.limit().cores(self._machine_cores)
        )


def detect_group(read: ReadText = read_text) -> Group | None:
    """Find the control group of this process, version 2 before version 1.

    None if neither can be read.
    """
    for make in (group_v2, group_v1):
        group = make(read)
        try:
            group.used_seconds()
            group.limit()
        except (OSError, ValueError):
            continue
        return group
    return None


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


PROC_STAT: Final = "/proc/stat"
_FIELDS_NEEDED: Final = 6


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU time since boot, in any unit (ticks or seconds)."""

    busy: float
    idle: float

    def percent_since(self, before: CpuTimes) -> float | None:
        """Percent of busy time between two readings; None if no time passed.

        The kernel sometimes decreases the I/O wait and idle time of a sleeping CPU. A decrease
        counts as 0.
        """
        busy = max(self.busy - before.busy, 0.0)
        return percent(busy, busy + max(self.idle - before.idle, 0.0))


def parse_proc_stat(text: str) -> CpuTimes:
    """Parse the first line, which sums up all CPUs.

    Raises:
        ValueError: The text has another format.
    """
    fields = text.partition("\n")[0].split()
    if len(fields) < _FIELDS_NEEDED or fields[0] != "cpu":
        raise ValueError(f"{PROC_STAT} does not begin with a line for all CPUs: {text[:80]!r}")
    user, nice, system, idle, io_wait = (float(f) for f in fields[1:6])
    return CpuTimes(busy=user + nice + system + io_wait, idle=idle)


class MachineCpu:
    """CPU of this machine, from the readings of `read`."""

    short_name = CPU
    max_utilization_percent = FULL_PERCENT

    def __init__(self, read: Callable[[], CpuTimes]) -> None:
        self._read = read
        self._before: CpuTimes | None = None

    def sample(self) -> float | None:
        """Percent of busy time since the last call; None at the first call.

        Raises:
            OSError: The source cannot be read.
            ValueError: The source cannot be parsed.
        """
        now = self._read()
        before, self._before = self._before, now
        return None if before is None else now.percent_since(before)


def proc_stat_cpu(read: ReadText = read_text) -> MachineCpu:
    """The CPU of this machine by /proc/stat."""
    return MachineCpu(lambda: parse_proc_stat(read(PROC_STAT)))


# Only the existence of this file is checked.
KUBERNETES_TOKEN: Final = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105
VENDOR: Final = "/sys/class/dmi/id/sys_vendor"
HYPERVISOR: Final = "/sys/hypervisor/uuid"


@dataclass(frozen=True, slots=True)
class Host:
    """The properties of a machine that decide the choice. The defaults are this machine."""

    system: str = sys.platform
    environment: Mapping[str, str] | None = None
    read: ReadText = read_text
    get: HttpGet = http_get
    exists: Callable[[str], bool] = os.path.exists
    cores: int = os.cpu_count() or 1

    def variable(self, name: str) -> str:
        """An environment variable; "" if it is not set."""
        return (os.environ if self.environment is None else self.environment).get(name, "")


def select_provider(
    clock: Clock, host: Host | None = None, *, events: EventSink = ignore_events
) -> MetricProvider | None:
    """Return the first CPU provider that can be read; None if there is none.

    A worker without a provider has no metrics.
    """
    for provider in _candidates(clock, host or Host()):
        try:
            provider.sample()
        except Exception as error:  # noqa: BLE001
            # After any error the next source is tried.
            events(CpuSourceSkipped(type(provider).__name__, f"{type(error).__name__}: {error}"))
            continue
        return provider
    return None


def _candidates(clock: Clock, host: Host) -> Iterator[MetricProvider]:
    if host.system == "linux":
        if host.variable(ENDPOINT_VARIABLE):
            yield EcsCpu(host.variable(ENDPOINT_VARIABLE), host.get)
        group = detect_group(host.read)
        has_token, on_ec2 = host.exists(KUBERNETES_TOKEN), is_ec2(host.read)
        if group is not None and (has_token or group.limit().cores(host.cores) < host.cores):
            yield GroupCpu(group, clock, host.cores, CPU if has_token or on_ec2 else OWN_CPU)
        if on_ec2:
            yield proc_stat_cpu(host.read)
    yield ProcessCpu(clock, host.cores)


def is_ec2(read: ReadText) -> bool:
    """Whether the firmware is Amazon's.

    Nitro instances name the vendor; older ones have a hypervisor id that starts with "ec2".
    """
    return _text(read, VENDOR).startswith("Amazon EC2") or _text(
        read, HYPERVISOR
    ).lower().startswith("ec2")


def _text(read: ReadText, path: str) -> str:
    try:
        return read(path)
    except OSError:
        return ""


FAILED_INTERVAL: Final = -1.0
MAX_RAW_VALUES: Final = 300
FIRST_SAMPLE_SECONDS: Final = 0.25
_MICRO: Final = Decimal("0.000001")

logger = logging.getLogger(__name__)


class WorkerMetricsReporter:
    """Capture and report the metrics of one worker.

    One thread calls `capture` and `report`. Every thread may read `drain_requested`.

    The first report does not wait for a capture, because the leader assigns no leases to a worker
    without a row. It does not report a failure either, because the leader assigns no leases to a
    failing worker. While the provider has never returned a value, the row has no metrics.
    Afterwards, an interval in which all captures failed is reported as −1. An interval without a
    capture adds no value.
    """

    def __init__(
        self,
        table: WorkerMetricsTable,
        worker_id: str,
        settings: WorkerSettings,
        clock: Clock,
        rng: random.Random,
        provider: MetricProvider | None,
        *,
        run_id: str | None = None,
        replaces: str | None = None,
        status: Callable[[], WorkerStatus] | None = None,
    ) -> None:
        self._table = table
        self._worker_id = worker_id
        self._clock = clock
        self._provider = None if settings.disable_worker_metrics else provider
        self._run_id = run_id
        self._replaces = replaces
        self._status = status
        self._raw: deque[float] = deque(maxlen=MAX_RAW_VALUES)
        self._averages: deque[float] = deque(
            maxlen=settings.no_of_persisted_metrics_per_worker_metrics
        )
        # Random, so that workers that start together do not sample at the same time.
        self._first_capture = (
            clock.monotonic()
            + rng.random() * settings.in_memory_worker_metrics_capture_frequency_millis / 1000
        )
        self._reported = False
        self._has_value = False
        self._tried = False
        self._warned = False
        self.drain_requested = False
        """Whether the stored row contained a drain request. It is never reset."""
        self.drains_for_pause = False
        """Whether the reason of the drain request is that the application is paused."""
        self._deregistered = False
        self._was_stored = False
        self.taken: WorkerIdTakenError | None = None
        """Set when another process has started under this worker id: this one must end."""

    def note_pause(self) -> None:
        """Note that the application is paused, as if the row contained a request for it."""
        self.drain_requested = self.drains_for_pause = True

    def capture(self) -> None:
        """Capture one value.

        Never raises. A failed capture, or a value outside 0 to 100, is dropped.
        """
        if self._provider is not None and self._clock.monotonic() >= self._first_capture:
            self._sample(self._provider)

    def _sample(self, provider: MetricProvider) -> None:
        self._tried = True
        try:
            value = checked(provider.sample())
        except Exception as error:  # noqa: BLE001
            # A provider may be the user's own. Its errors must not stop the worker.
            if not self._warned:
                logger.warning(
                    "cannot capture worker metric %s: %s: %s",
                    provider.short_name,
                    type(error).__name__,
                    printable(str(error)),
                )
                self._warned = True
            return
        if value is not None:
            self._has_value = True
            self._warned = False
            self._raw.append(value)

    def report(self) -> WorkerMetrics:
        """Write the row with the average of the interval that ends now.

        After `deregister` nothing is written, and neither after another process has taken the
        worker id (`taken`). The first report takes the worker id over.

        Returns:
            The row as stored.

        Raises:
            errors.AwsError: The table raised it. The next report contains the average.
        """
        if self._provider is not None and not self._deregistered:
            self._close_interval(self._provider)
        row = self._row()
        if self._deregistered or self.taken is not None:
            return row
        try:
            stored = self._table.report(row, takes_over=not self._was_stored)
        except WorkerIdTakenError as error:
            self.taken = error
            return row
        self._was_stored = True
        if stored.drain_requested and not self.drain_requested:
            self.drain_requested, self.drains_for_pause = True, stored.drains_for_pause
        return stored

    def verify_run(self) -> bool:
        """Read the row, set `taken` if another process has taken the worker id; return if not.

        Any thread may call it.

        Raises:
            errors.AwsError: The table raised it.
        """
        if self._run_id is not None and self._was_stored:
            try:
                self._table.verify_run(self._worker_id, self._run_id)
            except WorkerIdTakenError as error:
                self.taken = error
        return self.taken is None

    def note_taken(self) -> None:
        """Note in the row of the other process that this one ends, for those who look at it.

        Raises:
            errors.AwsError: The table raised it.
        """
        other = None if self.taken is None else self.taken.other_run_id
        if self._run_id is not None and other is not None:
            millis = round(self._clock.wall() * 1000)
            self._table.note_former_run(self._worker_id, self._run_id, other, millis)

    def _close_interval(self, provider: MetricProvider) -> None:
        if not self._reported and not self._raw:
            self._sample(provider)
            if not self._raw:  # a source with counters needs two readings
                self._clock.sleep(FIRST_SAMPLE_SECONDS)
                self._sample(provider)
        self._reported = True
        if self._has_value and self._tried:
            self._averages.append(round_half_up(fmean(self._raw)) if self._raw else FAILED_INTERVAL)
        self._tried = False
        self._raw.clear()

    def _row(self) -> WorkerMetrics:
        averages = tuple(self._averages)
        provider = self._provider if averages else None
        name = None if provider is None else provider.short_name
        is_own = name == OWN_CPU
        return WorkerMetrics(
            worker_id=self._worker_id,
            last_update_seconds=int(self._clock.wall()),
            stats={} if name is None or is_own else {name: averages},
            operating_range={}
            if provider is None or is_own
            else {provider.short_name: (provider.max_utilization_percent,)},
            own_cpu=averages if is_own else (),
            run_id=self._run_id,
            status=None if self._status is None else self._status(),
            replaces=self._replaces,
        )

    def deregister(self) -> None:
        """Delete the row, unless it is of another process. It is not written again.

        Raises:
            errors.AwsError: The table raised it.
        """
        self._deregistered = True
        self._table.deregister(self._worker_id, self._run_id)


def checked(value: float | None) -> float | None:
    """Return the value if it is None or from 0 to 100.

    Raises:
        ValueError: The value is out of range.
    """
    if value is not None and not (math.isfinite(value) and 0 <= value <= FULL_PERCENT):
        raise ValueError(f"{value} is not a percentage from 0 to 100")
    return value


def round_half_up(value: float) -> float:
    """Round to six decimals, halves away from zero (protocol §2.3)."""
    return float(Decimal(repr(value)).quantize(_MICRO, ROUND_HALF_UP))
