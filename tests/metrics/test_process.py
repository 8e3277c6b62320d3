"""CPU of a worker's own processes."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from kcl_pipeline.metrics import reporter


class Ticking:
    """A clock whose every reading is a second later."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        self.now += 1.0
        return self.now


def test_the_processes_of_a_worker_are_measured_and_not_the_machine():
    provider = reporter.ProcessCpu(Ticking(), 1)
    assert provider.sample() is None
    began = psutil.Process().cpu_times()
    while psutil.Process().cpu_times().user - began.user < 0.05:
        sum(range(10_000))
    value = provider.sample()
    assert 4 <= value <= 50


def test_a_child_counts_as_its_worker():
    provider = reporter.ProcessCpu(Ticking(), 1)
    provider.sample()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        child = psutil.Process(busy.pid)
        while child.cpu_times().user < 0.1:
            os.sched_yield()
        assert provider.sample() >= 9
    finally:
        busy.kill()
        busy.wait(10)
    provider.sample()
    assert provider.sample() >= 0
