"""Workers whose `streams=` differ: every stream of the application is read, and one that is missing
or forbidden does not stop the others.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kcl_pipeline.errors import AccessDeniedError, NotFoundError
from kcl_pipeline.events import LeadershipLost, StreamsDiffer, StreamUnavailable
from kcl_pipeline.leases.application import RecordedStream
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.testing.tables import create_lease
from tests.support.streams_world import ForbiddenStreams, StreamsWorld


def test_a_third_stream_of_a_new_worker_is_read_while_the_old_worker_leads():
    world = StreamsWorld("a", "b", "c")
    world.start("old", "a", "b")
    world.run(30)
    for stream in ("a", "b", "c"):
        world.put(stream, 30, stream)
    world.start("new", "a", "b", "c")
    assert world.run_until(world.has_all, 60) <= 60
    assert world.coordinator.read_lock().owner_name == "old"
    streams = {key.split(":")[1] for key in world.leases.rows()}
    assert streams == {"a", "b", "c"}


def test_the_old_worker_alone_reads_the_stream_that_only_its_successor_named():
    world = StreamsWorld("a", "b", "c")
    world.start("old", "a", "b")
    world.run(30)
    new = world.start("new", "a", "b", "c")
    world.run(5)
    del world.workers["new"]
    del new
    for stream in ("a", "b", "c"):
        world.put(stream, 30, stream)
    world.run_until(world.has_all, 120)


def test_an_old_worker_labels_a_stream_whose_name_is_not_unique_in_the_application():
    """Both streams of the name were recorded after the start of the worker, by others."""
    world = StreamsWorld("a", "b")
    old = world.start("old", "a", "b")
    world.run(10)
    record = world.coordinator.read_application()
    arns = [f"arn:aws:kinesis:us-east-1:{account}:stream/c" for account in "12"]
    added = (*record.identity.streams, *map(RecordedStream, arns))
    assert world.coordinator.put_application(
        replace(record.identity, streams=added), replacing=record
    )
    key = "2:c:5:shardId-000000000000"
    create_lease(world.leases, Lease(key, TRIM_HORIZON, stream="2:c:5"))
    world.run_until(lambda: key in old.lifecycle.consumers, 30)
    assert old.lifecycle.consumers[key].stream.column == arns[1]


def record_namesake(world):
    """Record the stream `a` of another account."""
    record = world.coordinator.read_application()
    other = RecordedStream("arn:aws:kinesis:us-east-1:2:stream/a")
    added = (*record.identity.streams, other)
    assert world.coordinator.put_application(
        replace(record.identity, streams=added), replacing=record
    )
    return other


def test_a_stream_has_its_arn_although_the_other_one_of_its_name_is_missing_at_the_start():
    world = StreamsWorld("a", "b")
    world.start("old", "a", "b")
    world.run(10)
    record_namesake(world)
    new = world.start("new", "a", "b")
    columns = {stream.column for stream in new._streams.opened()}
    assert columns == {world.model.stream("a").arn, "b"}


def test_a_worker_says_that_it_does_not_name_a_stream_of_another_account():
    world = StreamsWorld("a", "b")
    world.start("old", "a", "b")
    world.run(10)
    other = record_namesake(world)
    world.start("new", "a", "b")
    assert world.of(StreamsDiffer) == [StreamsDiffer("new", (other.arn,))]


def test_a_worker_reports_the_lag_of_each_stream():
    world = StreamsWorld("a", "b")
    world.put("a", 10, "a")
    world.start("w", "a", "b")
    world.run_until(world.has_all, 60)
    world.run(30)
    (row,) = world.rows.scan_workers().workers
    found = {one.stream.split(":")[1]: (one.millis, one.unknown) for one in row.status.streams}
    assert found == {"a": (0, 0), "b": (0, 0)}


def test_a_worker_whose_list_differs_says_so_once():
    world = StreamsWorld("a", "b", "c")
    world.start("old", "a", "b", "c")
    world.run(10)
    world.start("new", "a", "b")
    world.run(30)
    assert world.of(StreamsDiffer) == [StreamsDiffer("new", ("c",))]


def test_a_drain_does_not_wait_for_a_stream_that_is_not_in_its_list():
    world = StreamsWorld("a", "b", "c")
    world.put("c", 10, "c")
    world.start("old", "a", "b", "c")
    world.run(30)
    world.workers.clear()
    world.delete("c")
    world.clock.advance(60)
    world.put("a", 10, "a")
    world.start("new", "a", "b", drain=True)
    world.run_until(world.drains["new"].done, 120)
    assert world.has_all()


def test_a_missing_stream_of_several_does_not_stop_a_start():
    world = StreamsWorld("a", "b")
    world.start("old", "a", "b")
    world.run(20)
    world.delete("b")
    world.put("a", 20, "a")
    world.run(20)
    world.workers.clear()
    world.put("a", 20, "more")
    world.start("new", "a", "b")
    world.run_until(world.has_all, 120)
    world.run(120)
    assert not world.of(LeadershipLost)
    missing = [event for event in world.of(StreamUnavailable) if event.reporter == "new"]
    assert {event.stream for event in missing} == {"b"}
    assert 1 <= len(missing) <= 6, "the start and the leader, and once a minute"
    world.create("b", 3)
    world.put("b", 30, "b")
    assert world.run_until(world.has_all, 60) <= 60


def test_a_stream_that_was_never_there_is_read_as_soon_as_it_is_created():
    world = StreamsWorld("a")
    world.start("w", "a", "later")
    world.run(60)
    world.create("later")
    world.put("later", 10, "later")
    world.put("a", 10, "a")
    world.run_until(world.has_all, 60)


def test_a_forbidden_stream_of_several_does_not_stop_a_start():
    world = StreamsWorld("a", "b")
    kinesis = ForbiddenStreams(world.model, "b")
    world.put("a", 20, "a")
    world.start("w", "a", "b", kinesis=kinesis)
    world.run_until(world.has_all, 60)
    assert {event.stream for event in world.of(StreamUnavailable)} == {"b"}
    kinesis.streams = ()
    world.put("b", 10, "b")
    world.run_until(world.has_all, 60)


def test_when_no_stream_can_be_used_the_start_says_why():
    world = StreamsWorld()
    with pytest.raises(NotFoundError):
        world.start("w", "a", "b")
    with pytest.raises(AccessDeniedError):
        world.start("w", "a", "b", kinesis=ForbiddenStreams(world.model, "a", "b"))


def test_a_start_with_the_one_known_stream_missing_fits_the_record():
    world = StreamsWorld("a", "b")
    world.start("old", "a", "b")
    world.run(20)
    world.workers.clear()
    world.delete("a")
    world.create("c")
    world.put("c", 10, "c")
    world.start("new", "a", "c")
    world.run_until(world.has_all, 120)


def record_without(world, name):
    """The record after the tables were deleted and a worker with a former list was first."""
    record = world.coordinator.read_application()
    kept = tuple(one for one in record.identity.streams if one.name != name)
    assert len(kept) == 2
    world.coordinator.put_application(replace(record.identity, streams=kept), replacing=record)
    for key, row in world.leases.rows().items():
        if row["streamName"]["S"].split(":")[1] == name:
            world.leases.erase(key)


def recorded(world):
    return {one.name for one in world.coordinator.read_application().identity.streams}


def split(world, stream):
    world.model.call(
        "SplitShard",
        StreamName=stream,
        ShardToSplit="shardId-000000000000",
        NewStartingHashKey=str(2**126),
    )


def test_a_worker_records_its_stream_again_when_it_takes_a_lease():
    """Seed 9961000182: nobody read the stream of a deploy any more after the tables were lost."""
    world = StreamsWorld("a", "b", "c")
    world.start("old", "a", "b")
    world.start("new", "a", "b", "c")
    world.run(30)
    record_without(world, "c")
    world.put("c", 30, "c")
    world.run(30)
    assert recorded(world) == {"a", "b"}
    for stream in ("a", "b"):
        split(world, stream)
    world.run_until(world.has_all, 90)
    assert recorded(world) == {"a", "b", "c"}


def test_a_stream_that_is_deleted_stays_out_of_the_record_and_stops_nobody():
    """Seed 900000440: nobody said so if the leader did not name the stream."""
    world = StreamsWorld("a", "b", "c")
    world.start("old", "a", "b")
    world.start("new", "a", "b", "c")
    world.run(30)
    record_without(world, "c")
    world.delete("c")
    for stream in ("a", "b"):
        split(world, stream)
        world.put(stream, 30, stream)
    world.run_until(world.has_all, 90)
    assert recorded(world) == {"a", "b"}
    missing = world.of(StreamUnavailable)
    assert {(one.reporter, one.stream.rpartition("/")[2]) for one in missing} == {("new", "c")}
