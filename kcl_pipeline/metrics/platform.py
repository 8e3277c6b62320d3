"""Select the CPU provider of this worker (protocol §11.1).

The order is Amazon ECS, Kubernetes, a control group with a limit, EC2, psutil. Unlike in KCL, an
unreadable provider is skipped. Where KCL has no metric (neither ECS, nor Kubernetes, nor EC2), the
CPU has a name that KCL does not read. EC2 is recognised by its firmware, so that no request to the
instance metadata service is needed.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.events import CpuSourceSkipped, EventSink, ignore_events
from kcl_pipeline.metrics.cgroup import GroupCpu, detect_group
from kcl_pipeline.metrics.cpu import proc_stat_cpu
from kcl_pipeline.metrics.ecs import ENDPOINT_VARIABLE, EcsCpu, HttpGet, http_get
from kcl_pipeline.metrics.process import ProcessCpu
from kcl_pipeline.metrics.provider import CPU, OWN_CPU, MetricProvider, ReadText, read_text

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
