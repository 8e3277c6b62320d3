"""L10: the simulation fails on a drain that ends before its records are in the table."""

from types import SimpleNamespace

import pytest

from kcl_pipeline.worker.summary import StopReason, WorkerSummary
from kcl_pipeline.worker_status import WorkerStatus, WorkerTotals
from verification.simulation.checks.drains import SHUTDOWN_SECONDS, DrainCheck
from verification.simulation.checks.leases import LeaseChecks, Moved

SHARD, OTHER, CHILD = (f"shardId-{number:012}" for number in range(3))
SHARDS = [SimpleNamespace(shard_id=CHILD, parents=(OTHER, SHARD))]


class Events:
    """Stands for the checks of a seed with one stream: what is published, owned and committed."""

    def __init__(self, **events):
        self.ledger = SimpleNamespace(
            events={one: SimpleNamespace(lease_name=name) for one, name in events.items()}
        )
        self.left, self.moves, self.owners, self.rewinds = set(events), [], {}, 0
        orders = SimpleNamespace(ref="orders", lease_name=lambda shard_id: shard_id)
        self.streams = SimpleNamespace(
            of_name=lambda _: orders, settled=lambda _: SimpleNamespace(shards=SHARDS)
        )

    ancestry = LeaseChecks.ancestry

    def missing(self):
        return set(self.left)

    def rows(self):
        return [
            SimpleNamespace(unique_key=key, actual_owner=owner)
            for key, owner in self.owners.items()
        ]

    def now(self):
        return 100.0


def machine(mode="drain", configured=("orders",)):
    host = SimpleNamespace(name="m#1")
    return SimpleNamespace(mode=mode, worker_id="m", configured=configured, host=host)


def ended(check, reason=StopReason.DRAINED):
    return check.failures(WorkerSummary("m", reason, WorkerStatus(totals=WorkerTotals(1.0))))


def test_an_event_that_is_left_is_found():
    events = Events(a=SHARD, b=OTHER)
    check = DrainCheck(events, machine())
    events.left -= {"b"}
    (failure,) = ended(check)
    assert failure.startswith("L10: m#1 ")
    assert "['a']" in failure


def test_what_is_committed_or_published_later_is_not_left():
    events = Events(a=SHARD, later=SHARD)
    events.left = {"a"}
    check = DrainCheck(events, machine())
    events.left = {"later"}
    assert ended(check) == []


@pytest.mark.parametrize("reason", [one for one in StopReason if one is not StopReason.DRAINED])
def test_a_drain_that_does_not_say_so(reason):
    assert ended(DrainCheck(Events(a=SHARD), machine()), reason) == []


def test_a_worker_that_does_not_drain():
    assert ended(DrainCheck(Events(a=SHARD), machine("continuous"))) == []


def test_a_stream_that_the_drain_does_not_read():
    assert ended(DrainCheck(Events(a=SHARD), machine(configured=("payments",)))) == []


def test_another_worker_owns_the_lease_or_has_just_given_it_back():
    events = Events(a=SHARD, b=OTHER)
    check = DrainCheck(events, machine())
    events.owners = {SHARD: "w-2", OTHER: None}
    events.moves = [Moved(100 - SHUTDOWN_SECONDS, OTHER, "w-2", None)]
    assert ended(check) == []
    events.moves = [Moved(99 - SHUTDOWN_SECONDS, OTHER, "w-2", None), Moved(99, OTHER, "m", None)]
    assert "['b']" in ended(check)[0]
    events.owners[SHARD] = "m"
    assert "['a', 'b']" in ended(check)[0]


def test_a_child_of_a_lease_that_another_worker_owns():
    events = Events(a=CHILD)
    check = DrainCheck(events, machine())
    events.owners = {SHARD: "w-2"}
    assert ended(check) == []
    events.owners = {SHARD: "m"}
    assert "['a']" in ended(check)[0]
