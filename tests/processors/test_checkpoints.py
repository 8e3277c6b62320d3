"""What a checkpoint of a record processor does: the rules of docs/protocol.md §9, row by row."""

from __future__ import annotations

import threading

import pytest

from kcl_pipeline.errors import NotFoundError, ThrottledError, UnavailableError
from kcl_pipeline.position import SHARD_END, TRIM_HORIZON, Position
from tests.processors.log import Calls, row_of, world_of
from tests.support.kpl_encoder import aggregate_of
from tests.support.worker_world import numbered

ILLEGAL, SHUTDOWN = "IllegalArgumentException", "ShutdownException"


@pytest.fixture
def delivered():
    """A world whose processor has got ten records, and its checkpointer."""
    calls = Calls()
    world = world_of(calls)
    world.put(*numbered(10))
    world.run(5)
    (given,) = calls.inputs("process_records")
    return world, given.records, given.checkpointer, calls


def number_before(record):
    return str(int(record.sequence_number) - 1)


def number_after(record):
    return str(int(record.sequence_number) + 1)


RULES = {
    # rule: (checkpoints before, the call, refusal, index of the record that the row has then)
    "without a position, all that was delivered": ([], (), None, 9),
    "a delivered record": ([], (4,), None, 4),
    "a number without its sub-sequence number is sub-sequence number 0": ([], ("4",), None, 4),
    "the first record": ([], (0,), None, 0),
    "the same position again writes nothing": ([4], (4,), None, 4),
    "a later record": ([4], (5,), None, 5),
    "not before the last checkpoint": ([4], (3,), ILLEGAL, 4),
    "not after the last delivered record": ([], ("after",), ILLEGAL, None),
    "not after its last sub-sequence number": ([], (9, 1), ILLEGAL, None),
    "no negative sub-sequence number": ([], (4, -1), ILLEGAL, None),
    "no other text": ([], ("text",), ILLEGAL, None),
    "no empty text": ([], ("",), ILLEGAL, None),
    "not the end of a shard that has not ended": ([], ("SHARD_END",), ILLEGAL, None),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_position(delivered, rule):
    world, records, checkpointer, calls = delivered
    before, call, refusal, expected = RULES[rule]
    for index in before:
        checkpointer.checkpoint(records[index])
    counter = row_of(world).counter
    forms = {"4": records[4].sequence_number, "after": number_after(records[9])}
    position = [records[p] if isinstance(p, int) else forms.get(p, p) for p in call[:1]]
    if len(call) > 1:
        position = [records[call[0]].sequence_number, call[1]]
    assert calls.refusal(lambda: checkpointer.checkpoint(*position)) == refusal
    row = row_of(world)
    assert row.checkpoint == (
        TRIM_HORIZON if expected is None else Position(records[expected].sequence_number)
    )
    is_written = refusal is None and list(call) != (before or None)
    assert row.counter == counter + is_written


def test_the_worker_writes_no_checkpoint(delivered):
    world, records, checkpointer, _ = delivered
    checkpointer.checkpoint(records[3])
    world.run(30)
    assert row_of(world).checkpoint == Position(records[3].sequence_number)


def test_a_row_says_up_to_when_records_are_read_if_they_are_checkpointed(delivered):
    """Otherwise the loss of records that leave retention unprocessed would not be found."""
    world, records, checkpointer, _ = delivered
    arrived = records[-1].timestamp_millis
    world.run(30)
    assert (row_of(world).read_up_to_millis or 0) < arrived
    checkpointer.checkpoint()
    world.run(30)
    assert row_of(world).read_up_to_millis >= arrived


def test_records_after_the_checkpoint_are_delivered_to_the_next_owner(delivered):
    world, records, checkpointer, calls = delivered
    checkpointer.checkpoint(records[3])
    world.worker = world.make_worker("w-2")
    world.worker.start_up()
    world.run(10)
    _, second = calls.inputs("process_records")
    assert [record.binary_data for record in second.records] == numbered(10)[4:]
    _, start = calls.inputs("initialize")
    assert start.sequence_number == records[3].sequence_number


def test_a_sub_sequence_number_of_an_aggregate():
    calls = Calls()
    world = world_of(calls)
    members = [(f"k{index}", None, value) for index, value in enumerate(numbered(10))]
    world.put(aggregate_of(members), key="outer")
    world.run(5)
    (given,) = calls.inputs("process_records")
    assert [record.sub_sequence_number for record in given.records] == list(range(10))
    given.checkpointer.checkpoint(given.records[0].sequence_number, 4)
    assert row_of(world).checkpoint.sub_sequence_number == 4
    world.worker = world.make_worker("w-2")
    world.worker.start_up()
    world.run(10)
    _, second = calls.inputs("process_records")
    assert [record.binary_data for record in second.records] == numbered(10)[5:]
    second.checkpointer.checkpoint()
    assert row_of(world).checkpoint == Position(given.records[0].sequence_number, 9)
    number = given.records[0].sequence_number
    assert calls.refusal(lambda: second.checkpointer.checkpoint(number)) == ILLEGAL


def test_a_checkpoint_from_another_thread(delivered):
    world, records, checkpointer, _ = delivered
    thread = threading.Thread(target=checkpointer.checkpoint, args=(records[6],))
    thread.start()
    thread.join(30)
    assert row_of(world).checkpoint == Position(records[6].sequence_number)


FAILURES = {
    # what DynamoDB does: (error before the write, error after it, exception of the KCL)
    "throttled": (ThrottledError("slow down"), None, "ThrottlingException"),
    "no table": (NotFoundError("no table"), None, "InvalidStateException"),
    "unavailable": (UnavailableError("down"), None, "KinesisClientLibDependencyException"),
    "a lost answer": (None, UnavailableError("lost"), "KinesisClientLibDependencyException"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_write_that_fails_is_repeated_by_the_processor(delivered, failure):
    """Also if it was applied: the Java KCL takes the lease for lost then (protocol §1.4.1)."""
    world, records, checkpointer, calls = delivered
    *errors, exception = FAILURES[failure]

    def hook(error):
        def call(operation, _key):
            if error is not None and operation == "UpdateItem":
                raise error

        return call

    world.leases.hook(*map(hook, errors))
    assert calls.refusal(lambda: checkpointer.checkpoint(records[4])) == exception
    world.leases.hook(None, None)
    checkpointer.checkpoint(records[4])
    assert row_of(world).checkpoint == Position(records[4].sequence_number)
    world.run(5)
    assert "lease_lost" not in calls.names()


def test_a_lost_lease(delivered):
    """The row has another owner, but this worker does not know it yet."""
    world, _, checkpointer, calls = delivered
    world.leases.view().assign(row_of(world), "w-2")
    assert calls.refusal(checkpointer.checkpoint) == SHUTDOWN
    world.run_without_leader(1)
    assert calls.names()[-1] == "lease_lost"
    assert calls.refusal(checkpointer.checkpoint) == SHUTDOWN
    assert row_of(world).checkpoint == TRIM_HORIZON


# -- prepared checkpoints


def pending_of(world):
    row = row_of(world)
    return row.pending_checkpoint, row.pending_checkpoint_state


def test_a_prepared_checkpoint_leaves_the_checkpoint(delivered):
    world, records, checkpointer, calls = delivered
    checkpointer.checkpoint(records[1])
    prepared = checkpointer.prepare_checkpoint(records[4], application_state=b"\x01\x02")
    at = Position(records[4].sequence_number)
    assert (prepared.sequence_number, prepared.sub_sequence_number) == (at.sequence_number, 0)
    assert pending_of(world) == (at, b"\x01\x02")
    assert row_of(world).checkpoint == Position(records[1].sequence_number)
    world.run(5)
    assert pending_of(world) == (at, b"\x01\x02"), "renewals keep it"
    prepared.checkpoint()
    assert pending_of(world) == (None, None)
    assert row_of(world).checkpoint == at
    assert calls.refusal(lambda: checkpointer.prepare_checkpoint(records[3])) == ILLEGAL


def test_the_attributes_of_a_prepared_checkpoint(delivered):
    """Names and types are those that the Java KCL reads (protocol, appendix A.7)."""
    world, records, checkpointer, _ = delivered
    checkpointer.prepare_checkpoint(records[4], application_state=b"\x01\x02\x03")
    (item,) = world.leases.rows().values()
    pending = {name: value for name, value in item.items() if name.startswith("pending")}
    assert pending == {
        "pendingCheckpoint": {"S": records[4].sequence_number},
        "pendingCheckpointSubSequenceNumber": {"N": "0"},
        "pendingCheckpointState": {"B": b"\x01\x02\x03"},
    }


def test_the_next_owner_gets_a_prepared_checkpoint_and_starts_at_the_checkpoint(delivered):
    world, records, checkpointer, calls = delivered
    checkpointer.checkpoint(records[1])
    checkpointer.prepare_checkpoint(records[4], application_state=b"state")
    world.worker = world.make_worker("w-2")
    world.worker.start_up()
    world.run(10)
    first, second = calls.inputs("initialize")
    assert first.pending_checkpoint_sequence_number is None
    assert second.pending_checkpoint_sequence_number == records[4].sequence_number
    assert second.pending_checkpoint_sub_sequence_number == 0
    assert second.pending_checkpoint_state == b"state"
    assert second.sequence_number == records[1].sequence_number
    assert calls.data() == numbered(10) + numbered(10)[2:]


def test_any_checkpoint_discards_a_prepared_one(delivered):
    world, records, checkpointer, calls = delivered
    prepared = checkpointer.prepare_checkpoint(records[4], application_state=b"state")
    checkpointer.checkpoint(records[6])
    assert pending_of(world) == (None, None)
    assert calls.refusal(prepared.checkpoint) == ILLEGAL, "it is before the last checkpoint"


def test_a_second_prepared_checkpoint_replaces_the_first(delivered):
    world, records, checkpointer, _ = delivered
    checkpointer.prepare_checkpoint(records[4], application_state=b"first")
    checkpointer.prepare_checkpoint(records[3])
    assert pending_of(world) == (Position(records[3].sequence_number), None)


def test_preparing_at_the_last_checkpoint_writes_nothing(delivered):
    world, records, checkpointer, _ = delivered
    checkpointer.checkpoint(records[4])
    counter = row_of(world).counter
    checkpointer.prepare_checkpoint(records[4], application_state=b"state").checkpoint()
    assert pending_of(world) == (None, None)
    assert row_of(world).counter == counter


def test_preparing_without_a_position_keeps_the_sub_sequence_number():
    """The Java KCL drops it (protocol §9.3)."""
    calls = Calls()
    world = world_of(calls)
    world.put(aggregate_of([(f"k{i}", None, b"x") for i in range(5)]), key="outer")
    world.run(5)
    (given,) = calls.inputs("process_records")
    given.checkpointer.prepare_checkpoint(application_state=b"state")
    assert pending_of(world) == (Position(given.records[0].sequence_number, 4), b"state")


def test_a_prepared_checkpoint_of_a_lost_lease(delivered):
    world, records, checkpointer, calls = delivered
    world.leases.view().assign(row_of(world), "w-2")
    assert calls.refusal(lambda: checkpointer.prepare_checkpoint(records[4])) == SHUTDOWN
    assert pending_of(world) == (None, None)


def test_the_lost_answer_of_a_prepared_checkpoint(delivered):
    world, records, checkpointer, calls = delivered

    def lose(operation, _key):
        if operation == "UpdateItem":
            raise UnavailableError("lost")

    world.leases.hook(None, lose)
    refusal = calls.refusal(lambda: checkpointer.prepare_checkpoint(records[4], None, b"s"))
    assert refusal == "KinesisClientLibDependencyException"
    world.leases.hook(None, None)
    checkpointer.prepare_checkpoint(records[4], None, b"s").checkpoint()
    assert row_of(world).checkpoint == Position(records[4].sequence_number)


# -- the end of a shard


def split(world):
    world.model.call(
        "SplitShard",
        StreamName="orders",
        ShardToSplit="shardId-000000000000",
        NewStartingHashKey=str(2**127),
    )
    world.run(10)


ENDS = {
    # what shard_ended does: (call, whether the shard has ended then)
    "checkpoint without a position": (lambda given, _: given.checkpointer.checkpoint(), True),
    "checkpoint of the last record": (
        lambda given, last: given.checkpointer.checkpoint(last),
        True,
    ),
    "checkpoint of SHARD_END": (lambda given, _: given.checkpointer.checkpoint("SHARD_END"), True),
    "a prepared checkpoint that is made": (
        lambda given, _: given.checkpointer.prepare_checkpoint().checkpoint(),
        True,
    ),
    "a prepared checkpoint that is not made": (
        lambda given, _: given.checkpointer.prepare_checkpoint(),
        False,
    ),
    "checkpoint of an earlier record": (
        lambda given, last: given.checkpointer.checkpoint(str(int(last.sequence_number) - 1)),
        False,
    ),
    "nothing": (lambda *_: None, False),
}


@pytest.mark.parametrize(
    ("end", "is_checkpointed"),
    [
        (end, is_checkpointed)
        for end in ENDS
        for is_checkpointed in (False, True)
        if not (is_checkpointed and end == "checkpoint of an earlier record")
    ],
)
def test_the_end_of_a_shard(delivered, end, is_checkpointed):
    world, records, checkpointer, calls = delivered
    if is_checkpointed:
        checkpointer.checkpoint()
    call, has_ended = ENDS[end]
    calls.acts["shard_ended"] = lambda given: call(given, records[9])
    split(world)
    assert (row_of(world).checkpoint == SHARD_END) == has_ended
    assert len(calls.inputs("shard_ended")) == 1 or not has_ended
    starts = [given.shard_id for given in calls.inputs("initialize")]
    children = ["shardId-000000000001", "shardId-000000000002"]
    assert sorted(starts[1:]) == (children if has_ended else [])


def test_shard_ended_without_a_checkpoint_is_called_again(delivered):
    world, _, _, calls = delivered
    calls.acts["shard_ended"] = lambda _given: None
    split(world)
    count = len(calls.inputs("shard_ended"))
    assert count > 1
    errors = [str(getattr(event, "error", "")) for event in world.events]
    assert any("has not called checkpointer.checkpoint()" in text for text in errors)
    calls.acts["shard_ended"] = lambda given: given.checkpointer.checkpoint()
    world.run(40)
    assert row_of(world).checkpoint == SHARD_END
    assert len(calls.made) == 3, "the same processor, and those of the children"


def test_a_checkpoint_after_the_end_of_the_shard(delivered):
    world, records, checkpointer, calls = delivered

    def end(given):
        given.checkpointer.checkpoint()
        counter = row_of(world).counter
        assert calls.refusal(checkpointer.checkpoint) is None
        assert row_of(world).counter == counter, "nothing is written again"

    calls.acts["shard_ended"] = end
    split(world)
    assert calls.refusal(lambda: checkpointer.checkpoint(records[9])) == ILLEGAL
    assert row_of(world).checkpoint == SHARD_END
    assert calls.names().count("lease_lost") == 0
