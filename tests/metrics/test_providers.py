"""CPU providers: pure parsers on texts as the kernel and the metadata endpoint write them, and the
choice between providers.
"""

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.events import CpuSourceSkipped
from kcl_pipeline.metrics import cgroup, cpu, ecs, platform, process
from kcl_pipeline.metrics.provider import percent


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


# /proc/stat


def test_proc_stat_counts_iowait_as_busy_and_leaves_interrupts_out():
    times = cpu.parse_proc_stat(stat(100, 20, 30, 400, 50))
    assert times == cpu.CpuTimes(busy=200, idle=400)


@pytest.mark.parametrize("text", ["", "cpu0 1 2 3 4 5", "cpu 1 2 3", "intr 5 6 7 8 9 10"])
def test_proc_stat_refuses_other_texts(text):
    with pytest.raises(ValueError, match="line for all CPUs"):
        cpu.parse_proc_stat(text)


def test_proc_stat_percent_between_two_readings():
    files = Files({"/proc/stat": stat(100, 0, 100, 800, 0)})
    provider = cpu.proc_stat_cpu(files.read)
    assert provider.sample() is None, "nothing to compare with is not 0 percent"
    files["/proc/stat"] = stat(120, 0, 105, 870, 5)
    assert provider.sample() == pytest.approx(30.0)
    assert provider.sample() is None, "no time passed: no value"


def test_proc_stat_iowait_that_goes_back_counts_as_no_busy_time():
    files = Files({"/proc/stat": stat(100, 0, 0, 1000, 50)})
    provider = cpu.proc_stat_cpu(files.read)
    provider.sample()
    files["/proc/stat"] = stat(101, 0, 0, 1099, 40)
    assert provider.sample() == 0.0


@given(st.lists(st.tuples(*[st.integers(0, 10**9)] * 5), min_size=2, max_size=6))
def test_proc_stat_is_always_a_percentage_or_nothing(readings):
    texts = iter([stat(*r) for r in readings])
    provider = cpu.proc_stat_cpu(lambda _: next(texts))
    for _ in readings:
        value = provider.sample()
        assert value is None or 0 <= value <= 100


# cgroups


@pytest.mark.parametrize(
    ("text", "count"), [("0-7", 8), ("0-4,6,8-10\n", 9), ("3", 1), ("0,1,2", 3)]
)
def test_cpu_set(text, count):
    assert cgroup.parse_cpu_set(text) == count


@pytest.mark.parametrize("text", ["", "a-b", "3-1", "1,,2"])
def test_cpu_set_refuses(text):
    with pytest.raises(ValueError):
        cgroup.parse_cpu_set(text)


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000\n", None), ("50000 100000\n", 0.5), ("250000 100000", 2.5)]
)
def test_cpu_max(text, cores):
    assert cgroup.parse_cpu_max(text) == cores


@pytest.mark.parametrize(
    ("quota", "period", "cores"), [("-1\n", "100000\n", None), ("150000\n", "100000\n", 1.5)]
)
def test_cfs_quota(quota, period, cores):
    assert cgroup.parse_cfs_quota(quota, period) == cores


def test_cfs_quota_of_nothing_is_refused_instead_of_dividing_by_zero():
    with pytest.raises(ValueError, match="no limit"):
        cgroup.parse_cfs_quota("0", "100000")
    with pytest.raises(ValueError, match="no limit"):
        cgroup.parse_cpu_max("1000 0")


def test_usage_usec_wherever_it_stands():
    assert cgroup.parse_usage_usec("nr_periods 4\nusage_usec 2500000\nuser_usec 1\n") == 2.5
    with pytest.raises(ValueError, match="usage_usec"):
        cgroup.parse_usage_usec("user_usec 1\n")


def test_own_group():
    text = (
        "9:name=systemd:/x\n3:cpuset:/sets\n2:cpu,cpuacct:/docker/abc\n0::/system.slice/a.service\n"
    )
    assert cgroup.own_group(text, "cpuacct") == "/docker/abc"
    assert cgroup.own_group(text, "cpuset") == "/sets"
    assert cgroup.own_group(text, "") == "/system.slice/a.service"
    assert cgroup.own_group(text, "memory") == "/"


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


def test_cgroup_v2_of_its_quota():
    files, clock = v2_files(1_000_000), FakeClock()
    provider = cgroup.GroupCpu(cgroup.group_v2(files.read), clock, machine_cores=4)
    assert provider.sample() is None
    clock.now += 2
    files["/sys/fs/cgroup/cpu.stat"] = "usage_usec 1250000\n"
    assert provider.sample() == pytest.approx(25.0), "0.25 s of 2 s times half a core"
    files["/sys/fs/cgroup/cpu.max"] = "200000 100000\n"
    files["/sys/fs/cgroup/cpu.stat"] = "usage_usec 2250000\n"
    clock.now += 1
    assert provider.sample() == pytest.approx(50.0), "the quota was raised to two cores meanwhile"
    files["/sys/fs/cgroup/cpu.stat"] = "usage_usec 99250000\n"
    clock.now += 1
    assert provider.sample() == 100.0, "a burst above the quota is full, not more"


def test_cgroup_v2_without_quota_is_of_its_cpu_set():
    files, clock = v2_files(0, "max 100000\n", "0-1\n"), FakeClock()
    provider = cgroup.GroupCpu(cgroup.group_v2(files.read), clock, machine_cores=8)
    provider.sample()
    files["/sys/fs/cgroup/cpu.stat"] = "usage_usec 500000\n"
    clock.now += 1
    assert provider.sample() == pytest.approx(25.0)


def test_cgroup_v2_of_a_service_is_read_in_its_own_folder():
    root = "/sys/fs/cgroup/system.slice/kcl.service"
    files = v2_files(77, "max 100000\n") | Files()
    files = Files(files)
    files["/proc/self/cgroup"] = "0::/system.slice/kcl.service\n"
    files[f"{root}/cpu.stat"] = "usage_usec 3000000\n"
    files[f"{root}/cpu.max"] = "100000 100000\n"
    group = cgroup.group_v2(files.read)
    assert group.used_seconds() == 3.0
    assert group.limit() == cgroup.CpuLimit(quota_cores=1.0, set_cores=4)


@pytest.mark.parametrize("mount", ["cpu", "cpuacct", "cpu,cpuacct"])
def test_cgroup_v1_wherever_usage_is_mounted(mount):
    root = "/sys/fs/cgroup"
    files = Files(
        {
            "/proc/self/cgroup": "2:cpuacct:/docker/outside\n1:cpu:/docker/outside\n",
            f"{root}/{mount}/cpuacct.usage": "4000000000\n",
            f"{root}/cpu/cpu.cfs_quota_us": "200000\n",
            f"{root}/cpu/cpu.cfs_period_us": "100000\n",
            f"{root}/cpuset/cpuset.effective_cpus": "0-7\n",
        }
    )
    clock = FakeClock()
    provider = cgroup.GroupCpu(cgroup.group_v1(files.read), clock, machine_cores=8)
    provider.sample()
    files[f"{root}/{mount}/cpuacct.usage"] = "5000000000\n"
    clock.now += 1
    assert provider.sample() == pytest.approx(50.0)


def test_cgroup_sample_at_the_same_instant_is_no_value():
    provider = cgroup.GroupCpu(cgroup.group_v2(v2_files(5).read), FakeClock(), machine_cores=4)
    provider.sample()
    assert provider.sample() is None


# ECS

BASE = "http://metadata.invalid/v4/own-container"
CONTAINER = {"DockerId": "own", "Limits": {"CPU": 256, "Memory": 512}}
TASK = {
    "Limits": {"CPU": 1, "Memory": 2048},
    "Containers": [CONTAINER, {"DockerId": "side", "Limits": {"CPU": 768}}],
}


def stats(used: int, system: int, used_before: int, system_before: int, cpus: int = 2) -> Mapping:
    return {
        "cpu_stats": {
            "cpu_usage": {"total_usage": used},
            "system_cpu_usage": system,
            "online_cpus": cpus,
        },
        "precpu_stats": {
            "cpu_usage": {"total_usage": used_before},
            "system_cpu_usage": system_before,
        },
    }


class Pages(dict[str, object]):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.asked: list[str] = []

    def get_page(self, url: str) -> bytes:
        self.asked.append(url)
        if url not in self:
            raise OSError(f"{url}: timed out")
        return json.dumps(self[url]).encode()


def test_ecs_percent_of_the_containers_part_of_the_task():
    pages = Pages(
        {f"{BASE}/stats": stats(1100, 20_000, 1000, 18_000), BASE: CONTAINER, f"{BASE}/task": TASK}
    )
    provider = ecs.EcsCpu(BASE + "/", pages.get_page)
    # 100 / 2000 * 2 CPUs = 0.1 cores of 256/1024 of 1 vCPU
    assert provider.sample() == pytest.approx(40.0)
    assert provider.sample() == pytest.approx(40.0)
    assert pages.asked.count(f"{BASE}/task") == 1, "the limit is asked for once"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(stats(1000, 20_000, 0, 0), id="first reading, nothing before"),
        pytest.param(stats(1000, 20_000, 900, 20_000), id="no time between"),
        pytest.param(stats(100, 20_000, 900, 10_000), id="counter went back"),
    ],
)
def test_ecs_without_two_readings_has_no_value(answer):
    assert ecs.cores_used(answer) is None


def test_ecs_task_without_limit_and_containers_without_shares():
    task = {"Containers": [{"DockerId": "own"}, {"DockerId": "side", "Limits": {"CPU": 0}}]}
    assert ecs.container_cores({"DockerId": "own"}, task, online_cpus=4) == 2.0
    assert ecs.container_cores({"DockerId": "other"}, {"Containers": []}, online_cpus=4) == 4.0, (
        "no shares at all: no division by zero"
    )


def test_ecs_endpoint_that_does_not_answer_raises():
    with pytest.raises(OSError, match="timed out"):
        ecs.EcsCpu(BASE, Pages().get_page).sample()


def test_http_get_reads_only_good_answers_of_plain_http():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/v4/id/stats" else 404)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        base = f"http://127.0.0.1:{server.server_address[1]}/v4/id"
        assert ecs.http_get(f"{base}/stats") == b"{}"
        with pytest.raises(OSError, match="answered 404"):
            ecs.http_get(base)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    with pytest.raises(OSError):
        ecs.http_get(f"{base}/stats")
    with pytest.raises(OSError, match="not an http address"):
        ecs.http_get("file:///etc/hostname")


# the choice


def host(
    files: Files,
    *,
    environment=None,
    pages: Pages | None = None,
    exists=(),
    cores=4,
    system="linux",
) -> platform.Host:
    return platform.Host(
        system=system,
        environment=environment or {},
        read=files.read,
        get=(pages or Pages()).get_page,
        exists=lambda path: path in exists,
        cores=cores,
    )


ECS_VARIABLE = {"ECS_CONTAINER_METADATA_URI_V4": BASE}
EC2_FILES = {"/sys/class/dmi/id/sys_vendor": "Amazon EC2\n", "/proc/stat": stat(1, 2, 3, 4, 5)}


def test_ecs_comes_first():
    pages = Pages(
        {f"{BASE}/stats": stats(1100, 20_000, 1000, 18_000), BASE: CONTAINER, f"{BASE}/task": TASK}
    )
    files = v2_files(1)
    files.update(EC2_FILES)
    provider = platform.select_provider(
        FakeClock(),
        host(files, environment=ECS_VARIABLE, pages=pages, exists=[platform.KUBERNETES_TOKEN]),
    )
    assert isinstance(provider, ecs.EcsCpu)


def test_ecs_that_does_not_answer_gives_way_to_the_control_group():
    provider = platform.select_provider(FakeClock(), host(v2_files(1), environment=ECS_VARIABLE))
    assert isinstance(provider, cgroup.GroupCpu)


def test_a_kubernetes_pod_without_limit_is_still_measured_by_its_group():
    files = v2_files(1, "max 100000\n", "0-3\n")
    assert isinstance(
        platform.select_provider(FakeClock(), host(files, exists=[platform.KUBERNETES_TOKEN])),
        cgroup.GroupCpu,
    )


def test_a_group_without_limit_elsewhere_is_not_used():
    files = v2_files(1, "max 100000\n", "0-3\n")
    files.update(EC2_FILES)
    provider = platform.select_provider(FakeClock(), host(files))
    assert isinstance(provider, cpu.MachineCpu)
    files["/proc/stat"] = stat(11, 2, 3, 14, 5)
    assert provider.sample() == pytest.approx(50.0), (
        "it reads the /proc/stat of the EC2 instance, and the choice was the first sample"
    )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"/sys/class/dmi/id/sys_vendor": "Amazon EC2\n"}, True),
        ({"/sys/hypervisor/uuid": "EC2E1916-9099-7CAF-FD21-012345ABCDEF\n"}, True),
        ({"/sys/class/dmi/id/sys_vendor": "QEMU\n", "/sys/hypervisor/uuid": "0000\n"}, False),
        ({}, False),
    ],
)
def test_ec2_is_known_by_its_firmware(files, expected):
    assert platform.is_ec2(Files(files).read) is expected


@pytest.mark.parametrize("system", ["darwin", "win32", "linux"])
def test_elsewhere_psutil_gives_a_real_metric(system):
    files = v2_files(1) if system != "linux" else Files()
    provider = platform.select_provider(
        FakeClock(),
        host(files, environment=ECS_VARIABLE if system != "linux" else {}, system=system),
    )
    assert isinstance(provider, process.ProcessCpu)
    assert provider.short_name == "C"
    assert provider.max_utilization_percent == 100


def test_no_source_at_all_is_no_metric(monkeypatch):
    monkeypatch.setattr(process.ProcessCpu, "sample", lambda self: 1 / 0)
    events = []
    assert platform.select_provider(FakeClock(), host(Files()), events=events.append) is None
    assert events == [
        CpuSourceSkipped("ProcessCpu", "ZeroDivisionError: division by zero"),
    ]


def test_the_choice_on_this_machine_reaches_no_network(monkeypatch):
    monkeypatch.delenv("ECS_CONTAINER_METADATA_URI_V4", raising=False)
    monkeypatch.setattr("socket.socket.connect", lambda *a: pytest.fail("a connection was opened"))
    assert platform.select_provider(FakeClock()) is not None


@given(st.floats(0, 1e12), st.floats(-1, 1e12))
def test_percent_is_bounded(used, available):
    value = percent(used, available)
    assert value is None or 0 <= value <= 100
