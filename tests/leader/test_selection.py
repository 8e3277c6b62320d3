"""Streams that are selected at run time."""

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.events import AwsTrouble, StreamsDiffer
from kcl_pipeline.leader.streams import ASK_SECONDS, StreamSelection, selected_streams
from kcl_pipeline.testing.clock import VirtualClock
from tests.support.streams_world import StreamsWorld


class Done:
    def join(self, timeout=None):
        pass

    def is_alive(self):
        return False


def inline(_name, target):
    target()
    return Done()


class SelectingWorld(StreamsWorld):
    """Workers whose streams are those of `selected`, which may be an error."""

    def __init__(self, *streams):
        super().__init__(*streams, shards=1)
        self.selected = streams
        self.asked = 0

    def select(self):
        self.asked += 1
        if isinstance(self.selected, Exception):
            raise self.selected
        return self.selected

    def start(self, name, **overrides):
        selection = StreamSelection(self.select, self.clock, self.events.append, inline)
        return super().start(
            name, selects_streams=True, selection=selection, select=self.select, **overrides
        )

    def recorded(self):
        return [one.name for one in self.coordinator.read_application().identity.streams]


def test_a_stream_that_appears_is_read_within_two_minutes():
    world = SelectingWorld("a")
    world.put("a", 20, "a")
    world.start("w")
    world.run_until(world.has_all, limit=60)
    world.create("b", 1)
    world.put("b", 20, "b")
    world.selected = ("a", "b")
    world.run_until(world.has_all, limit=120)
    assert world.recorded() == ["a", "b"]
    assert world.of(StreamsDiffer) == []
    minutes = world.clock.monotonic() / ASK_SECONDS
    assert world.asked <= minutes + 3


def test_no_stream_at_first():
    world = SelectingWorld()
    world.start("w")
    world.run(30)
    world.create("a", 1)
    world.put("a", 20, "a")
    world.selected = ("a",)
    world.run_until(world.has_all, limit=120)


@pytest.mark.parametrize("answer", [ValueError("no"), (), ("other name",), "a", ("b",)])
def test_a_flapping_answer_changes_nothing_that_is_read(answer):
    world = SelectingWorld("a", "b")
    world.start("w")
    world.run(10)
    world.selected = answer
    world.run(90)
    for stream in "ab":
        world.put(stream, 20, stream)
    world.run_until(world.has_all, limit=20)
    trouble = [event for event in world.of(AwsTrouble) if "selection" in event.operation]
    assert bool(trouble) == (answer != ("b",))


def test_a_worker_starts_with_the_recorded_streams_if_the_selection_fails(caplog):
    world = SelectingWorld("a")
    world.start("one")
    world.selected = LookupError("no")
    world.put("a", 20, "a")
    world.start("two")
    world.run_until(world.has_all, limit=60)
    failed = [event for event in world.of(AwsTrouble) if "selection" in event.operation]
    assert {event.error for event in failed} == {"LookupError: no"}
    logged = [record.exc_info for record in caplog.records if record.exc_info is not None]
    assert [kind for kind, _, _ in logged] == [LookupError], "its traceback, once"


def test_a_slow_answer_delays_nothing():
    clock, waiting = VirtualClock(), []

    class Hung(Done):
        def is_alive(self):
            return True

    selection = StreamSelection(
        lambda: ["a"], clock, print, lambda _, target: waiting.append(target) or Hung()
    )
    for _ in range(5):
        selection.poll()
        clock.advance(ASK_SECONDS)
    assert len(waiting) == 1
    assert selection.answer == ((), 0)
    waiting[0]()
    assert selection.answer == (("a",), 1)


@pytest.mark.parametrize("answer", ["a", None, [1], ["a b"], [f"s{n}" for n in range(10_001)]])
def test_unusable_answers(answer):
    with pytest.raises(SettingsError, match="selection returned"):
        selected_streams(lambda: answer)


def test_the_settings_need_streams_or_a_selection():
    with pytest.raises(ValueError, match="streams"):
        ConsumerSettings(application_name="app", streams=())
    assert ConsumerSettings(
        application_name="app", streams=(), selects_streams=True
    ).is_multi_stream
