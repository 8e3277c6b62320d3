"""Measure the CPU of a container by its control group, version 1 or 2 (protocol §11.4, §11.5)."""

import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.metrics.provider import CPU, FULL_PERCENT, ReadText, percent, read_text

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
