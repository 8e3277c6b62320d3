"""The limits of one input: processor time, and growth of resident memory."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"
_LIBC: Final = ctypes.CDLL(None)
_ADDRESS_SPACE_BYTES: Final = 4 << 30
"""What one input may reserve: an allocation beyond it fails before the machine runs out."""


class TimeLimitError(BaseException):
    """One input took more processor time than it may.

    Not an `Exception`, because code that is checked may catch those.
    """


class MemoryLimitError(Exception):
    """The resident memory grew by more than one input may take."""


@contextlib.contextmanager
def limited(cpu_seconds: float, megabytes: int) -> Iterator[None]:
    """Check what is within for its processor time and its memory. Main thread only.

    Processor time and not wall time: a busy machine must not look like a defect. A wait without
    end is left to the time-out of the test, or of the process in `make fuzz`.
    """

    def over(*_: object) -> None:
        raise TimeLimitError(f"one input took more than {cpu_seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, over)
    resident = _reset_peak()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    _limit_address_space(hard)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    grown = (_kilobytes("VmHWM") - resident) / 1024
    if grown > megabytes:
        raise MemoryLimitError(f"one input took {grown:.0f} MB of memory, more than {megabytes}")


def _reset_peak() -> int:
    """Start a new peak of the resident memory; returns what it is now, in KiB.

    What was freed before goes back to the system first. An input that takes it again would not
    grow, so that its memory depended on what the process did before.
    """
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(AttributeError):  # other C libraries than glibc
        _LIBC.malloc_trim(0)
    with contextlib.suppress(OSError):
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
    return _kilobytes("VmHWM")


def _limit_address_space(hard: int) -> None:
    wanted = _kilobytes("VmSize") * 1024 + _ADDRESS_SPACE_BYTES
    if hard == resource.RLIM_INFINITY or wanted < hard:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def _kilobytes(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise LookupError(f"{_STATUS} has no {field}")
