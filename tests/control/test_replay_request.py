"""The options of a replay."""

from __future__ import annotations

import pytest

from kcl_pipeline.control.operations import ReplayRequest
from kcl_pipeline.control.replay import check_options, replay_id_of, replay_record
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.leases.application import ReplayRecord
from kcl_pipeline.leases.row import MAX_MILLIS

NOW = 1_000_000.0


def test_times_are_absolute_or_before_now():
    record = replay_record(
        ReplayRequest(from_time="10m", to_time="1970-01-12T13:46:00Z", in_place=True), NOW
    )
    assert record == ReplayRecord(999_400_000, 999_960_000)
    assert (record.begin.isoformat(), record.end.minute) == ("1970-01-12T13:36:40+00:00", 46)
    record = replay_record(ReplayRequest(from_time="10m", into="side", only_stream="s"), NOW)
    assert record == ReplayRecord(999_400_000, 1_000_000_000, "side", "s")


def test_dead_letters_need_no_times():
    request = ReplayRequest(in_place=True, dead_letters=True)
    record = replay_record(request, NOW)
    assert (record.from_millis, record.to_millis) == (0, MAX_MILLIS)
    record = replay_record(
        ReplayRequest(from_time="10m", to_time="1m", in_place=True, dead_letters=True), NOW
    )
    assert (record.from_millis, record.to_millis) == (999_400_000, 999_940_000)


def test_a_time_is_rounded_up_to_the_milliseconds_of_arrival_times():
    """A float of seconds would be a millisecond less for some times."""
    for millis in range(1000):
        text = f"1970-01-12T13:00:00.{millis:03}Z"
        record = replay_record(ReplayRequest(from_time=text, in_place=True), NOW)
        assert record.from_millis == 997_200_000 + millis
        assert record.begin.microsecond == millis * 1000
    record = replay_record(
        ReplayRequest(from_time="1970-01-12T13:00:00.000001Z", in_place=True), NOW
    )
    assert record.from_millis == 997_200_001


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"in_place": True}, "--from is missing"),
        ({"from_time": "10m"}, "--into ADDRESS for a side table, or --in-place"),
        ({"from_time": "soon", "in_place": True}, "--from 'soon' is not a time"),
        ({"from_time": "10m", "to_time": "soon", "in_place": True}, "--to 'soon' is not a time"),
        ({"from_time": "1970-01-01T00:00:00", "in_place": True}, "no time zone"),
        ({"from_time": "2026-11-23", "in_place": True}, "write 2026-11-23T00:00:00Z for UTC"),
        ({"from_time": "1m", "to_time": "1971-01-01T00:00:00Z", "in_place": True}, "in the future"),
        ({"from_time": "1m", "to_time": "2m", "in_place": True}, "is not before --to 2m"),
    ],
)
def test_wrong_options_are_one_sentence(options, sentence):
    with pytest.raises(SettingsError, match=sentence):
        replay_record(ReplayRequest(**options), NOW)


@pytest.mark.parametrize("options", [{"replay_id": "A B"}, {"into": "side", "in_place": True}])
def test_options_that_never_fit(options):
    with pytest.raises(SettingsError):
        replay_id_of(ReplayRequest(**options))


def test_a_replay_is_continued_with_the_options_of_its_begin():
    found = ReplayRecord(999_400_000, 999_960_000, "side")
    fitting = [
        {},
        {"into": "side"},
        {"from_time": "5s", "to_time": "1s"},
        {"from_time": "1970-01-12T13:36:40Z", "to_time": "1970-01-12T13:46:00Z"},
    ]
    for options in fitting:
        check_options(ReplayRequest(replay_id="again", **options), found, NOW)
    others = [
        ("--from", {"from_time": "1970-01-12T13:36:41Z"}),
        ("--to", {"to_time": "1970-01-12T13:46:01Z"}),
        ("--into", {"into": "other"}),
        ("--in-place", {"in_place": True}),
        ("--only-stream", {"only_stream": "s"}),
    ]
    for name, options in others:
        with pytest.raises(SettingsError, match=f"{name} differs from the replay 'again'"):
            check_options(ReplayRequest(replay_id="again", **options), found, NOW)
