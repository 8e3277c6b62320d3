"""A record processor that keeps what it was called with, and does what a test says."""

from __future__ import annotations

from kcl_pipeline.processors import CheckpointError, RecordProcessor
from tests.support.worker_world import World


class Calls:
    """The calls of all processors of a test: (number of the processor, method, input)."""

    def __init__(self):
        self.made = []
        self.calls = []
        self.refused = []
        self.acts = {}
        """What a processor does in a method; `act(input)`."""

    def processor(self, skips=False):
        log = self

        class Logged(RecordProcessor):
            skips_failures = skips

            def __init__(self):
                log.made.append(self)
                self.number = len(log.made)

            def _note(self, name, given):
                log.calls.append((self.number, name, given))
                if name in log.acts:
                    log.acts[name](given)

            def initialize(self, initialize_input):
                self._note("initialize", initialize_input)

            def process_records(self, process_records_input):
                self._note("process_records", process_records_input)

            def lease_lost(self, lease_lost_input):
                self._note("lease_lost", lease_lost_input)

            def shard_ended(self, shard_ended_input):
                self._note("shard_ended", shard_ended_input)

            def shutdown_requested(self, shutdown_requested_input):
                self._note("shutdown_requested", shutdown_requested_input)

        return Logged

    def names(self):
        """Names of the calls, without repetitions of `process_records`."""
        names = [name for _, name, _ in self.calls]
        return [
            name
            for index, name in enumerate(names)
            if name != "process_records" or index == 0 or names[index - 1] != name
        ]

    def shard_of(self, number):
        """The shard of the processor with this number."""
        return next(
            given.shard_id
            for made, name, given in self.calls
            if (made, name) == (number, "initialize")
        )

    def inputs(self, name):
        return [given for _, called, given in self.calls if called == name]

    def data(self):
        return [
            record.binary_data
            for given in self.inputs("process_records")
            for record in given.records
        ]

    def refusal(self, call):
        """Name of the KCL's exception of a checkpoint. None: it was written."""
        try:
            call()
        except CheckpointError as error:
            self.refused.append(error.value)
            return error.value
        return None


def world_of(calls, shards=1, skips=False, **settings):
    return World(shards=shards, buffered=True, processor=calls.processor(skips), **settings)


def rows_of(world):
    return {lease.lease_key: lease for lease in world.leases.list_leases().leases}


def row_of(world, number=0):
    return rows_of(world)[f"shardId-{number:012}"]
