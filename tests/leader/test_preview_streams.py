"""The preview looks at the recorded streams, as the leader does."""

from __future__ import annotations

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import NotFoundError
from kcl_pipeline.leader.preview import preview
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from tests.support.streams_world import StreamsWorld


def seen(world, *streams, with_record=True, **settings):
    return preview(
        ConsumerSettings(application_name="app", streams=streams, **settings),
        world.leases,
        world.rows,
        InMemoryKinesis(world.model),
        world.clock,
        record=world.coordinator.read_application() if with_record else None,
    )


@pytest.mark.parametrize(
    ("streams", "settings"), [(("a", "b"), {}), ((), {"selects_streams": True})]
)
def test_a_recorded_stream_that_the_settings_do_not_name_is_planned(streams, settings):
    world = StreamsWorld("a", "b", "c")
    world.start("old", "a", "b")
    world.run(30)
    world.start("new", "a", "b", "c")
    found = seen(world, *streams, **settings)
    assert {lease.lease_key.split(":")[1] for lease in found.create} == {"c"}
    assert {one.stream.split(":")[1] for one in found.coverage} == {"a", "b", "c"}


def test_a_missing_stream_of_several_is_named_and_the_others_are_planned():
    world = StreamsWorld("a", "b")
    world.start("old", "a", "b")
    world.run(30)
    world.delete("b")
    found = seen(world, "a", "b")
    assert {one.stream.split(":")[1] for one in found.coverage} == {"a"}
    assert [one.stream for one in found.unavailable] == ["b"]
    with pytest.raises(NotFoundError):
        seen(world, "b", with_record=False)
