"""One stream to several and back: refused at the start, before anything is written."""

import pytest

from kcl_pipeline.errors import OtherApplicationError
from tests.support.streams_world import StreamsWorld

ONE, SEVERAL = ("a",), ("a", "b")


@pytest.mark.parametrize("has_record", [True, False])
@pytest.mark.parametrize(("before", "after"), [(ONE, SEVERAL), (SEVERAL, ONE)])
def test_the_other_form_is_refused_and_the_former_goes_on(before, after, has_record):
    world = StreamsWorld("a", "b", shards=1)
    world.put("a", 10, "old")
    world.start("w", *before)
    world.run_until(world.has_all, limit=60)
    if not has_record:  # as the Java KCL leaves the tables
        world.workers.clear()
        world.coordinator.erase("Migration3.0")
    tables = (world.leases, world.rows, world.coordinator)
    rows = [table.rows() for table in tables]
    with pytest.raises(OtherApplicationError) as refused:
        world.start("new", *after)
    text = str(refused.value)
    assert "write" in text
    assert "another name" in text
    assert "do accept" in text
    assert "\n" not in text
    assert [table.rows() for table in tables] == rows
    if has_record:
        world.put("a", 10, "new")
        world.run_until(world.has_all, limit=20)
