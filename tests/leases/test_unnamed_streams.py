"""Recorded streams that the settings do not name, also with one name in two accounts."""

from __future__ import annotations

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leases.application import (
    ApplicationIdentity,
    InitialPositions,
    RecordedStream,
    streams_to_read,
    unnamed_labels,
)
from kcl_pipeline.shards import StreamId


def arn(account, name):
    return f"arn:aws:kinesis:us-east-1:{account}:stream/{name}"


OWN_A, OTHER_A, OWN_B = arn("1", "a"), arn("2", "a"), arn("1", "b")


def recorded(*arns):
    return ApplicationIdentity("multi_stream", tuple(map(RecordedStream, arns)))


@pytest.mark.parametrize(
    ("names", "others"),
    [
        (("a", OTHER_A), (OWN_B,)),
        ((OWN_A, OTHER_A, "b"), ()),
        ((OWN_A, "b"), (OTHER_A,)),
        (("b",), (OWN_A, OTHER_A)),
        (("a", "b"), (OWN_A, OTHER_A)),
    ],
)
def test_the_streams_to_read(names, others):
    streams = recorded(OWN_A, OTHER_A, OWN_B).streams
    assert streams_to_read(names, streams, is_multi_stream=True) == (*names, *others)
    assert streams_to_read(names, streams, is_multi_stream=False) == names
    assert streams_to_read(names, (), is_multi_stream=True) == names


def test_a_stream_is_told_by_its_name_unless_another_account_has_one_of_that_name():
    identity = recorded(OWN_A, OTHER_A, OWN_B)
    assert unnamed_labels(identity.streams, (OWN_A,)) == (OTHER_A, "b")
    assert unnamed_labels(recorded(OWN_A, OWN_B).streams, ("a",)) == ("b",)


@pytest.mark.parametrize(
    ("names", "position"), [(("a", "b"), "LATEST"), (("a", OTHER_A), "TRIM_HORIZON")]
)
def test_a_stream_of_another_account_begins_where_it_was_recorded(names, position):
    """A process whose settings have the name only begins no stream of another account."""
    settings = ConsumerSettings(
        application_name="app",
        streams=names,
        shard_sync={"initial_position_in_stream": "TRIM_HORIZON"},
    )
    positions = InitialPositions(settings)
    positions.note_record(
        [
            RecordedStream(OWN_A, initial_position="TRIM_HORIZON"),
            RecordedStream(OTHER_A, initial_position="LATEST"),
        ]
    )
    assert positions.of(StreamId("a", "1", 5, OWN_A)).initial_position_in_stream == "TRIM_HORIZON"
    assert positions.of(StreamId("a", "2", 5, OTHER_A)).initial_position_in_stream == position
