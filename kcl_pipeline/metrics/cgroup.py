"""CPU of a container by its control group, version 1 or 2 (protocol §11.4, §11.5)."""

from __future__ import annotations

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
    """How many CPUs "0-4,6,8-10" names (here 9). Raises `ValueError` for anything else."""
    count = 0
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        size = int(last or first) - int(first) + 1
        if size < 1:
            raise ValueError(f"{text!r} is not a list of CPUs")
        count += size
    return count


def parse_cpu_max(text: str) -> float | None:
    """The cores that `cpu.max` allows; None for "max"."""
    quota, period = text.split()[:_PAIR]
    return None if quota == "max" else _cores(float(quota), float(period))


def parse_cfs_quota(quota: str, period: str) -> float | None:
    """The cores that `cpu.cfs_quota_us` and `cpu.cfs_period_us` allow; None for no limit."""
    return None if int(quota) < 0 else _cores(float(quota), float(period))


def _cores(quota: float, period: float) -> float:
    if quota <= 0 or period <= 0:
        raise ValueError(f"a CPU quota of {quota:g} per {period:g} microseconds is no limit")
    return quota / period


def parse_usage_usec(text: str) -> float:
    """CPU seconds used, from `cpu.stat` of version 2.

    Raises `ValueError` when it has no `usage_usec`.
    """
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "usage_usec":
            return int(value) / 1e6
    raise ValueError(f"cpu.stat has no usage_usec: {text[:80]!r}")


def own_group(text: str, controller: str) -> str:
    """The path of this process's group from /proc/self/cgroup; `controller` "" is version 2.

    "/" when it is not listed.
    """
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return path or "/"
    return "/"


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """What a group may use, in cores: by quota, and by the CPUs it may run on; None where it does
    not say.
    """

    quota_cores: float | None
    set_cores: int | None

    def cores(self, machine_cores: int) -> float:
        """The smaller of the two; the whole machine when neither says."""
        return min(
            self.quota_cores or machine_cores, self.set_cores or machine_cores, machine_cores
        )


@dataclass(frozen=True, slots=True)
class Group:
    """How to read one control group.

    Both raise `OSError` or `ValueError` when it cannot be read.
    """

    used_seconds: Callable[[], float]
    limit: Callable[[], CpuLimit]


def group_v2(read: ReadText) -> Group:
    """Version 2: one hierarchy.

    The group of this process, or the root of what is mounted (inside a container that is its own
    group).
    """
    folders = _folders(read, ROOT, "")

    def limit() -> CpuLimit:
        maximum = _first_text(read, folders, ["cpu.max"])
        cpus = _first_text(read, folders, ["cpuset.cpus.effective"])
        return CpuLimit(
            parse_cpu_max(maximum) if maximum else None,
            parse_cpu_set(cpus) if cpus and cpus.strip() else None,
        )

    return Group(lambda: parse_usage_usec(_need(read, folders, ["cpu.stat"])), limit)


def group_v1(read: ReadText) -> Group:
    """Version 1: one hierarchy per controller, which may be mounted apart or together."""
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

    return Group(lambda: int(_need(read, usage, ["cpuacct.usage"])) / 1e9, limit)


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


def _need(read: ReadText, folders: Sequence[str], names: Sequence[str]) -> str:
    text = _first_text(read, folders, names)
    if text is None:
        raise FileNotFoundError(f"none of {list(names)} can be read in {list(folders)}")
    return text


class GroupCpu:
    """CPU that a control group used, of what it may use; the limit is read with every sample,
    because it may be changed while running.
    """

    short_name = CPU
    max_utilization_percent = FULL_PERCENT

    def __init__(self, group: Group, clock: Clock, machine_cores: int) -> None:
        self._group = group
        self._clock = clock
        self._machine_cores = machine_cores
        self._before: tuple[float, float] | None = None

    def sample(self) -> float | None:
        """Percent of the limit used since the last call.

        Raises `OSError` or `ValueError` when the group cannot be read.
        """
        used, now = self._group.used_seconds(), self._clock.monotonic()
        before, self._before = self._before, (used, now)
        if before is None:
            return None
        return percent(
            used - before[0], (now - before[1]) * self._group.limit().cores(self._machine_cores)
        )


def is_limited(limit: CpuLimit, machine_cores: int) -> bool:
    """Whether the group may use less than the machine has."""
    return limit.cores(machine_cores) < machine_cores


def detect_group(read: ReadText = read_text) -> Group | None:
    """The control group of this process, version 2 before version 1; None when neither tells its
    usage.
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
