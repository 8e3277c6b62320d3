"""A defect keeps its type, and its traceback is in the log once per cause."""

from __future__ import annotations

import logging

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.events import AwsTrouble, CycleFailed, DefectFound
from kcl_pipeline.unexpected import described
from tests.support.worker_world import World


def raised(error):
    def fail():
        raise error

    try:
        fail()
    except Exception as caught:  # noqa: BLE001
        return caught


def test_an_error_of_this_package_keeps_its_sentence_and_is_not_logged(caplog):
    assert described(raised(UnavailableError("no answer")), "a test") == "no answer"
    assert caplog.records == []


def test_a_defect_has_its_type_and_one_traceback_per_cause(caplog):
    for _ in range(3):
        assert described(raised(KeyError("x")), "a test") == "KeyError: 'x'"
    (record,) = caplog.records
    assert (record.levelno, record.exc_info[0]) == (logging.ERROR, KeyError)
    assert "a test" in record.getMessage()
    try:
        {}["y"]
    except KeyError as other:
        described(other, "another step")
    assert len(caplog.records) == 2


def test_a_defect_in_the_step_of_a_shard_does_not_look_like_trouble_with_aws(caplog):
    world = World(shards=1)

    def fail(*_, **__):
        raise KeyError("x")

    world.worker.source.begin = fail
    world.run(2)
    assert {one.error for one in world.of(DefectFound)} == {"KeyError: 'x'"}
    assert not [one for one in world.of(AwsTrouble) if "KeyError" in one.error]
    assert len(world.of(DefectFound)) < 6, "the waits grow"
    assert [one.exc_info[0] for one in caplog.records if one.exc_info] == [KeyError]


def test_a_defect_of_a_cycle_has_a_traceback(caplog):
    world = World(shards=1)
    leader = world.make_leader("other")

    def fail(*_, **__):
        raise ZeroDivisionError("a defect")

    world.coordinator.observe_lock = fail
    report = leader.run_once()
    assert report.error == "ZeroDivisionError: a defect"
    assert [one for one in world.events if isinstance(one, CycleFailed)]
    assert [one.exc_info[0] for one in caplog.records if one.exc_info] == [ZeroDivisionError]
