"""Files, pages and a clock made up for tests of CPU providers."""

import threading


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_760_000_000 + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def signal(self):
        raise NotImplementedError

    def lock(self):
        return threading.Lock()


class Files(dict[str, str]):
    """A file system of texts."""

    def read(self, path: str) -> str:
        if path not in self:
            raise FileNotFoundError(path)
        return self[path]


def stat(user, nice, system, idle, iowait) -> str:
    return (
        f"cpu  {user} {nice} {system} {idle} {iowait} 7 8 9 10 11\ncpu0 1 2 3 4 5 0 0 0 0 "
        "0\nintr 1\n"
    )


def v2_files(usage_usec: int, cpu_max: str = "50000 100000\n", cpus: str = "0-3\n") -> Files:
    root = "/sys/fs/cgroup"
    return Files(
        {
            "/proc/self/cgroup": "0::/\n",
            f"{root}/cgroup.controllers": "cpuset cpu memory\n",
            f"{root}/cpu.stat": f"usage_usec {usage_usec}\nuser_usec 1\n",
            f"{root}/cpu.max": cpu_max,
            f"{root}/cpuset.cpus.effective": cpus,
        }
    )
