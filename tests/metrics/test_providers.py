"""CPU providers: pure parsers on texts as the kernel and the metadata endpoint write them, and the
choice between providers.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.metrics import reporter
from kcl_pipeline.metrics.reporter import percent
from tests.support.metric_sources import FakeClock, Files, stat, v2_files

# /proc/stat


def test_proc_stat_counts_iowait_as_busy_and_leaves_interrupts_out():
    times = reporter.parse_proc_stat(stat(100, 20, 30, 400, 50))
    assert times == reporter.CpuTimes(busy=200, idle=400)


@pytest.mark.parametrize("text", ["", "cpu0 1 2 3 4 5", "cpu 1 2 3", "intr 5 6 7 8 9 10"])
def test_proc_stat_refuses_other_texts(text):
    with pytest.raises(ValueError, match="line for all CPUs"):
        reporter.parse_proc_stat(text)


def test_proc_stat_percent_between_two_readings():
    files = Files({"/proc/stat": stat(100, 0, 100, 800, 0)})
    provider = reporter.proc_stat_cpu(files.read)
    assert provider.sample() is None, "nothing to compare with is not 0 percent"
    files["/proc/stat"] = stat(120, 0, 105, 870, 5)
    assert provider.sample() == pytest.approx(30.0)
    assert provider.sample() is None, "no time passed: no value"


def test_proc_stat_iowait_that_goes_back_counts_as_no_busy_time():
    files = Files({"/proc/stat": stat(100, 0, 0, 1000, 50)})
    provider = reporter.proc_stat_cpu(files.read)
    provider.sample()
    files["/proc/stat"] = stat(101, 0, 0, 1099, 40)
    assert provider.sample() == 0.0


@given(st.lists(st.tuples(*[st.integers(0, 10**9)] * 5), min_size=2, max_size=6))
def test_proc_stat_is_always_a_percentage_or_nothing(readings):
    texts = iter([stat(*r) for r in readings])
    provider = reporter.proc_stat_cpu(lambda _: next(texts))
    for _ in readings:
        value = provider.sample()
        assert value is None or 0 <= value <= 100


# cgroups


@pytest.mark.parametrize(
    ("text", "count"), [("0-7", 8), ("0-4,6,8-10\n", 9), ("3", 1), ("0,1,2", 3)]
)
def test_cpu_set(text, count):
    assert reporter.parse_cpu_set(text) == count


@pytest.mark.parametrize("text", ["", "a-b", "3-1", "1,,2"])
def test_cpu_set_refuses(text):
    with pytest.raises(ValueError):
        reporter.parse_cpu_set(text)


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000\n", None), ("50000 100000\n", 0.5), ("250000 100000", 2.5)]
)
def test_cpu_max(text, cores):
    assert reporter.parse_cpu_max(text) == cores


@pytest.mark.parametrize(
    ("quota", "period", "cores"), [("-1\n", "100000\n", None), ("150000\n", "100000\n", 1.5)]
)
def test_cfs_quota(quota, period, cores):
    assert reporter.parse_cfs_quota(quota, period) == cores


def test_cfs_quota_of_nothing_is_refused_instead_of_dividing_by_zero():
    with pytest.raises(ValueError, match="is not valid"):
        reporter.parse_cfs_quota("0", "100000")
    with pytest.raises(ValueError, match="is not valid"):
        reporter.parse_cpu_max("1000 0")


def test_usage_usec_wherever_it_stands():
    assert reporter.parse_usage_usec("nr_periods 4\nusage_usec 2500000\nuser_usec 1\n") == 2.5
    with pytest.raises(ValueError, match="usage_usec"):
        reporter.parse_usage_usec("user_usec 1\n")


def test_own_group():
    text = (
        "9:name=systemd:/x\n3:cpuset:/sets\n2:cpu,cpuacct:/docker/abc\n0::/system.slice/a.service\n"
    )
    assert reporter.own_group(text, "cpuacct") == "/docker/abc"
    assert reporter.own_group(text, "cpuset") == "/sets"
    assert reporter.own_group(text, "") == "/system.slice/a.service"
    assert reporter.own_group(text, "memory") == "/"


def test_cgroup_v2_of_its_quota():
    files, clock = v2_files(1_000_000), FakeClock()
    provider = reporter.GroupCpu(reporter.group_v2(files.read), clock, machine_cores=4)
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
    provider = reporter.GroupCpu(reporter.group_v2(files.read), clock, machine_cores=8)
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
    group = reporter.group_v2(files.read)
    assert group.used_seconds() == 3.0
    assert group.limit() == reporter.CpuLimit(quota_cores=1.0, set_cores=4)


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
    provider = reporter.GroupCpu(reporter.group_v1(files.read), clock, machine_cores=8)
    provider.sample()
    files[f"{root}/{mount}/cpuacct.usage"] = "5000000000\n"
    clock.now += 1
    assert provider.sample() == pytest.approx(50.0)


def test_cgroup_sample_at_the_same_instant_is_no_value():
    provider = reporter.GroupCpu(reporter.group_v2(v2_files(5).read), FakeClock(), machine_cores=4)
    provider.sample()
    assert provider.sample() is None


# ECS


# the choice


@given(st.floats(0, 1e12), st.floats(-1, 1e12))
def test_percent_is_bounded(used, available):
    value = percent(used, available)
    assert value is None or 0 <= value <= 100
