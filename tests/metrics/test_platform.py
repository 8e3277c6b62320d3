"""The choice of a CPU provider, and the container metrics of ECS."""

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kcl_pipeline.events import CpuSourceSkipped
from kcl_pipeline.metrics import reporter
from tests.support.metric_sources import FakeClock, Files, stat, v2_files

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
    provider = reporter.EcsCpu(BASE + "/", pages.get_page)
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
    assert reporter.cores_used(answer) is None


def test_ecs_task_without_limit_and_containers_without_shares():
    task = {"Containers": [{"DockerId": "own"}, {"DockerId": "side", "Limits": {"CPU": 0}}]}
    assert reporter.container_cores({"DockerId": "own"}, task, online_cpus=4) == 2.0
    assert (
        reporter.container_cores({"DockerId": "other"}, {"Containers": []}, online_cpus=4) == 4.0
    ), "no shares at all: no division by zero"


def test_ecs_endpoint_that_does_not_answer_raises():
    with pytest.raises(OSError, match="timed out"):
        reporter.EcsCpu(BASE, Pages().get_page).sample()


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
        assert reporter.http_get(f"{base}/stats") == b"{}"
        with pytest.raises(OSError, match="returned status 404"):
            reporter.http_get(base)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    with pytest.raises(OSError):
        reporter.http_get(f"{base}/stats")
    with pytest.raises(OSError, match="not an http URL"):
        reporter.http_get("file:///etc/hostname")


def host(
    files: Files,
    *,
    environment=None,
    pages: Pages | None = None,
    exists=(),
    cores=4,
    system="linux",
) -> reporter.Host:
    return reporter.Host(
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
    provider = reporter.select_provider(
        FakeClock(),
        host(files, environment=ECS_VARIABLE, pages=pages, exists=[reporter.KUBERNETES_TOKEN]),
    )
    assert isinstance(provider, reporter.EcsCpu)


def test_ecs_that_does_not_answer_gives_way_to_the_control_group():
    provider = reporter.select_provider(FakeClock(), host(v2_files(1), environment=ECS_VARIABLE))
    assert isinstance(provider, reporter.GroupCpu)


def test_a_kubernetes_pod_without_limit_is_still_measured_by_its_group():
    files = v2_files(1, "max 100000\n", "0-3\n")
    assert isinstance(
        reporter.select_provider(FakeClock(), host(files, exists=[reporter.KUBERNETES_TOKEN])),
        reporter.GroupCpu,
    )


@pytest.mark.parametrize(
    ("more", "exists", "name"),
    [
        ({}, [reporter.KUBERNETES_TOKEN], "C"),
        (EC2_FILES, [], "C"),
        ({}, [], "kclpCpu"),
    ],
    ids=["Kubernetes", "EC2", "elsewhere"],
)
def test_a_group_has_the_metric_of_kcl_only_where_kcl_has_one(more, exists, name):
    files = v2_files(1)
    files.update(more)
    provider = reporter.select_provider(FakeClock(), host(files, exists=exists))
    assert isinstance(provider, reporter.GroupCpu)
    assert provider.short_name == name


def test_a_group_without_limit_elsewhere_is_not_used():
    files = v2_files(1, "max 100000\n", "0-3\n")
    files.update(EC2_FILES)
    provider = reporter.select_provider(FakeClock(), host(files))
    assert isinstance(provider, reporter.MachineCpu)
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
    assert reporter.is_ec2(Files(files).read) is expected


@pytest.mark.parametrize("system", ["darwin", "win32", "linux"])
def test_elsewhere_psutil_gives_a_real_metric(system):
    files = v2_files(1) if system != "linux" else Files()
    provider = reporter.select_provider(
        FakeClock(),
        host(files, environment=ECS_VARIABLE if system != "linux" else {}, system=system),
    )
    assert isinstance(provider, reporter.ProcessCpu)
    assert provider.short_name == "kclpCpu"
    assert provider.max_utilization_percent == 100


def test_no_source_at_all_is_no_metric(monkeypatch):
    monkeypatch.setattr(reporter.ProcessCpu, "sample", lambda self: 1 / 0)
    events = []
    assert reporter.select_provider(FakeClock(), host(Files()), events=events.append) is None
    assert events == [
        CpuSourceSkipped("ProcessCpu", "ZeroDivisionError: division by zero"),
    ]


def test_the_choice_on_this_machine_reaches_no_network(monkeypatch):
    monkeypatch.delenv("ECS_CONTAINER_METADATA_URI_V4", raising=False)
    monkeypatch.setattr("socket.socket.connect", lambda *a: pytest.fail("a connection was opened"))
    assert reporter.select_provider(FakeClock()) is not None
