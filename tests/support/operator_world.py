"""An application on in-memory tables that an operator changes while its workers run.

While the operator's code waits, `sleep` of its clock lets the workers work.
"""

from __future__ import annotations

from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.worker.summary import StopReason
from tests.support.worker_world import LEAD_SECONDS, World


class OperatorClock:
    """The virtual clock of a world. A sleep runs its workers."""

    def __init__(self, world: OperatorWorld) -> None:
        self._world = world
        self.monotonic = world.clock.monotonic
        self.wall = world.clock.wall
        self.signal = world.clock.signal
        self.lock = world.clock.lock

    def sleep(self, seconds: float) -> None:
        self._world.work(seconds)


class OperatorWorld(World):
    """Workers by name. Each obeys a drain request as `Worker.run` does."""

    def __init__(self, shards=2, workers=("w-1",), **settings):
        super().__init__(shards=shards, **settings)
        self._led = self.clock.monotonic() - LEAD_SECONDS
        self.running = {"w-1": self.worker}
        self.ended = {}
        for name in workers[1:]:
            self.start(name)
        self.app = ApplicationControl(
            self.settings, self.leases, self.rows, self.coordinator, OperatorClock(self), "ann"
        )

    def start(self, name):
        worker = self.make_worker(name, run_id=f"{name}@{self.clock.wall()}")
        worker.start_up()
        self.running[name] = worker
        return worker

    def crash(self, name):
        """As kill -9."""
        return self.running.pop(name)

    def work(self, seconds, step=0.2):
        """Let the workers run; one that is requested to end does so."""
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until:
            leads = self.clock.monotonic() - self._led >= LEAD_SECONDS
            if leads:
                self._led = self.clock.monotonic()
            for name, worker in list(self.running.items()):
                worker.lease_tick()
                if leads:
                    worker.lead_tick()
                worker.fetch_tick()
                worker.process_tick()
                if worker.reporter.drain_requested:
                    self.end(name)
            self.clock.advance(step)

    def end(self, name):
        worker = self.running.pop(name)
        pauses = worker.reporter.drains_for_pause
        self.ended[name] = StopReason.APPLICATION_PAUSED if pauses else StopReason.DRAIN_REQUESTED
        worker._leaving.leave()

    def owners(self):
        return {one.lease_key: one.actual_owner for one in self.leases.list_leases().leases}

    def work_until(self, condition, seconds=120):
        deadline = self.clock.monotonic() + seconds
        while not condition():
            assert self.clock.monotonic() < deadline, self.owners()
            self.work(0.5)
