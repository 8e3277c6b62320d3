"""Wrong input of every kind: one sentence that names the setting, its value and what to write."""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import Any

import pytest
from pydantic import ValidationError

from kcl_pipeline import DeltaSink, Fleet, KinesisPipeline
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.settings_errors import nearest, setting_names, settings_sentence, unknown

SINK = DeltaSink("lake/orders")


def transform(records: Any) -> Any:
    return records


def make(*given: Any, **changes: Any) -> KinesisPipeline:
    arguments = {"name": "orders", "streams": ["orders"], "sink": SINK} | changes
    return KinesisPipeline(*given, **({} if given else arguments))


def settings(group: str, **values: Any) -> dict[str, Any]:
    return {"settings_overrides": {group: values}}


WRONG: list[tuple[dict[str, Any], str]] = [
    # misspelled names
    (
        settings("lease", failover_time_milis=5000),
        "lease.failover_time_milis is not a setting. Did you mean lease.failover_time_millis?",
    ),
    (
        settings("lease", failoverTimeMillis=5000),
        "lease.failoverTimeMillis is not a setting. Did you mean lease.failover_time_millis?",
    ),
    (
        {"settings_overrides": {"failover_time_millis": 5000}},
        "failover_time_millis is not a setting. Did you mean lease.failover_time_millis?",
    ),
    (
        {"settings_overrides": {"leese": {}}},
        "leese is not a setting. Did you mean lease?",
    ),
    (
        settings("batch", zzz=1),
        "batch.zzz is not a setting. Write one of batch.max_batch_records,",
    ),
    ({"sinks": SINK}, "sinks is not an argument of KinesisPipeline. Did you mean sink?"),
    (
        {"transfrom": transform},
        "transfrom is not an argument of KinesisPipeline. Did you mean transform?",
    ),
    # types and choices
    (
        settings("batch", failed_records="skipp"),
        "batch.failed_records='skipp' is not one of its values. Did you mean 'skip'?",
    ),
    (
        settings("batch", failed_records="parse"),
        (
            "batch.failed_records='parse' is not one of its values. "
            "Write 'dead_letter', 'fail' or 'skip'."
        ),
    ),
    (
        settings("lease", failover_time_millis="5000"),
        (
            "lease.failover_time_millis='5000' is not a whole number. "
            "Write a time in milliseconds, 100 or more."
        ),
    ),
    (
        settings("lease", failover_time_millis=True),
        (
            "lease.failover_time_millis=True is not a whole number. "
            "Write a time in milliseconds, 100 or more."
        ),
    ),
    (
        settings("lease", failover_time_millis=1.5),
        "lease.failover_time_millis=1.5 is not a whole number.",
    ),
    (
        settings("lease", consistent_reads=1),
        "lease.consistent_reads=1 is not True or False. Write True or False.",
    ),
    (
        {"settings_overrides": {"lease": 5}},
        (
            "lease=5 is not a group of settings. "
            "Write a dictionary, such as {'failover_time_millis': 10000}."
        ),
    ),
    (
        {"settings_overrides": [("lease", {})]},
        "settings_overrides=[('lease', {})] is not a dictionary. Write settings_overrides={",
    ),
    (
        settings("lease_table", tags={"team": 5}),
        (
            "lease_table.tags.team=5 is not a string. "
            "Write a dictionary of strings, such as {'team': 'orders'}."
        ),
    ),
    # ranges
    (
        settings("batch", min_batch_interval_millis=-1),
        "batch.min_batch_interval_millis=-1 is too small. Write a time in milliseconds, 0 or more.",
    ),
    (
        settings("lease", failover_time_millis=10**30),
        (
            "lease.failover_time_millis=1000000000000000000000000000000 is too large. "
            "Write a time in milliseconds, 100 to 2147483647."
        ),
    ),
    (
        settings("retrieval", max_records=10_001),
        "retrieval.max_records=10001 is too large. Write a number of records, 1 to 10000.",
    ),
    (
        settings("assignment", max_throughput_per_host_kbps=math.nan),
        (
            "assignment.max_throughput_per_host_kbps=nan is too small. "
            "Write a rate in KiB per second, more than 0."
        ),
    ),
    (
        settings("lease_table", table_name="x"),
        "lease_table.table_name='x' is too short. Write a string of 3 to 255 characters, or None.",
    ),
    # settings that do not fit together
    (
        settings("leader", leader_lease_duration_millis=1000),
        "leader.leader_lease_duration_millis=1000 is below two heartbeats. Write 5000 or more,",
    ),
    (
        settings("shard_sync", initial_position_in_stream="AT_TIMESTAMP"),
        (
            "shard_sync.initial_timestamp=None does not fit "
            "initial_position_in_stream='AT_TIMESTAMP'. Write a time with a time zone,"
        ),
    ),
    (
        settings("shard_sync", initial_timestamp=datetime(2026, 1, 1)),  # noqa: DTZ001 (the point)
        (
            "shard_sync.initial_timestamp=2026-01-01T00:00:00 has no time zone. "
            "Write 2026-01-01T00:00:00+00:00 for UTC."
        ),
    ),
    (
        settings("retrieval", consumer_arns={"orders": "arn:aws:x"}),
        (
            "retrieval.consumer_arns['orders']='arn:aws:x' is not the ARN of a consumer. "
            "Write arn:aws:kinesis:"
        ),
    ),
    (
        settings("assignment", lease_assignment_strategy="balancd"),
        "assignment.lease_assignment_strategy='balancd' is not known. Did you mean 'balanced'?",
    ),
    (
        settings("assignment", lease_assignment_strategy="zzz"),
        "assignment.lease_assignment_strategy: 'zzz' is not a strategy. Write one of balanced,",
    ),
    (
        {"settings_overrides": {"streams": ["x"]}},
        "settings_overrides['streams'] is set by the argument streams. Write streams=... instead.",
    ),
    # name and streams
    ({"name": 5}, "name=5 is not a string. Write the name of the application,"),
    ({"name": ""}, "name='' is empty. Write the name of the application,"),
    (
        {"name": "my orders"},
        (
            "name='my orders' has characters that are not allowed. "
            "Write 3 to 230 of the characters A-Z a-z 0-9 _ . -."
        ),
    ),
    ({"name": "or"}, "name='or' is too short. Write 3 to 230 of the characters"),
    ({"streams": "orders"}, "streams='orders' is a string. Write streams=['orders']."),
    ({"streams": 5}, "streams=5 is not a list. Write a list with the name of a stream"),
    ({"streams": {"orders"}}, "streams={'orders'} is not a list."),
    ({"streams": []}, "streams=() is empty. Write a list of stream names or ARNs,"),
    ({"streams": [5]}, "streams[0]=5 is not a string."),
    ({"streams": ["a", "a"]}, "streams=['a', 'a'] names a stream twice. Write each stream once."),
    (
        {"streams": ["my orders"]},
        "streams[0]='my orders' is not a stream. Write the name of a stream (1 to 128 of",
    ),
    (
        {"streams": ["arn:aws:kinesis:eu-west-1:1:stream/orders/consumer/c:1"]},
        "streams[0]='arn:aws:kinesis:eu-west-1:1:stream/orders/consumer/c:1' is not a stream.",
    ),
    # sink, transforms, workers, Spark
    ({"sink": "lake/x"}, "sink='lake/x' is a string. Write sink=DeltaSink('lake/x')."),
    ({"sink": None}, "sink=None is not a sink. Write sink=DeltaSink("),
    ({"sink": DeltaSink}, "is a class or function. Write sink=ForeachArrowSink(function) or"),
    (
        {"transform_arrow": "parse"},
        (
            "transform_arrow='parse' is not a function. "
            "Write transform_arrow=a function of a pyarrow.Table."
        ),
    ),
    (
        {"transform": lambda: None},
        "cannot be called with one argument (records): it takes (). Write transform=a function",
    ),
    (
        {"transform": transform, "transform_arrow": transform},
        "transform and transform_arrow are both set. Write one of them.",
    ),
    ({"workers": 3}, "workers=3 is not a Fleet. Write workers=Fleet(min=1, max=3)."),
    ({"workers": (1, 8)}, "workers=(1, 8) is not a Fleet. Write workers=Fleet(min=1, max=8)."),
    (
        {"spark_config": {"spark.executor.cores": 4}},
        "spark_config['spark.executor.cores'] is of type int, not a string.",
    ),
    (
        {"spark_config": {"spark.eventLog.enabled": True}},
        "spark_config['spark.eventLog.enabled']=True is not a string. Write 'true'.",
    ),
    ({"spark_config": "x=y"}, "spark_config is not a dictionary. Write spark_config={"),
]


@pytest.mark.parametrize(("changes", "sentence"), WRONG, ids=[s[:60] for _, s in WRONG])
def test_a_wrong_argument_is_answered_with_what_to_write(changes, sentence):
    with pytest.raises(SettingsError) as caught:
        make(**changes)
    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message
    assert message.endswith((".", "?"))


def test_several_wrong_settings_are_all_named():
    with pytest.raises(SettingsError) as caught:
        make(settings_overrides={"lease": {"epsilon_millis": -1}, "batch": {"max_batch_bytes": 0}})
    assert "lease.epsilon_millis=-1" in str(caught.value)
    assert "batch.max_batch_bytes=0" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("orders", ["orders"]), "sink=None is not a sink. Write sink=DeltaSink("),
        ((), "KinesisPipeline has no name."),
        (
            ("a", ["a"], SINK, None, None, Fleet(), {}, {}, None, None, 10),
            "has 10 arguments, but 11 are given.",
        ),
    ],
)
def test_missing_and_surplus_arguments(arguments, sentence):
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        KinesisPipeline(*arguments)
    with pytest.raises(SettingsError, match="KinesisPipeline has name twice"):
        KinesisPipeline("orders", ["orders"], SINK, name="orders")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"min": 0}, "Fleet min=0 is too small. Write a number of workers, 1 or more."),
        ({"max": "8"}, "Fleet max='8' is not a whole number."),
        ({"max": True}, "Fleet max=True is not a whole number."),
        ({"max": 2.0}, "Fleet max=2.0 is not a whole number."),
        ({"min": 9, "max": 8}, "Fleet max=8 is less than min=9. Write max=9 or more."),
        ({"max_starting": 0}, "Fleet max_starting=0 is too small. Write a number of runs, 1 or"),
        ({"rolling_replacement": 1}, "Fleet rolling_replacement=1 is not True or False."),
        ({"code_version": 7}, "Fleet code_version=7 is not a string."),
        ({"code_version": " "}, "Fleet code_version=' ' is empty."),
        ({"run_tags": ["team"]}, "Fleet run_tags=['team'] is not a dictionary."),
        ({"run_tags": {"team": 4}}, "Fleet run_tags['team']=4 is not a string. Write '4'."),
        ({"run_tags": {"kcl/mode": "drain"}}, "Fleet run_tags['kcl/mode'] is a tag of "),
        ({"run_tags": {"dagster/max_runtime": "9"}}, "run_tags['dagster/max_runtime'] is a tag of"),
        ({"run_tags": {".dagster/x": "9"}}, "run_tags['.dagster/x'] is a tag of"),
        ({"run_tags": {"a b": "9"}}, "run_tags['a b'] is not the key of a tag."),
        ({"maximum": 8}, "maximum is not an argument of Fleet. Did you mean max?"),
    ],
)
def test_a_wrong_fleet(arguments, sentence):
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        Fleet(**arguments)


def test_what_is_right_is_accepted():
    arn = "arn:aws-us-gov:kinesis:us-gov-west-1:123456789012:stream/orders"
    for changes in (
        {},
        {"streams": ("orders", arn)},
        {"transform": transform},
        {"transform_arrow": transform},
        {"transform": lambda records, extra=1: records},
        {"workers": Fleet(2, 8)},
        {"settings_overrides": {"lease": {"failover_time_millis": 100}}},
        {"settings_overrides": {"assignment": {"lease_assignment_strategy": "BALANCED"}}},
        {
            "settings_overrides": {
                "shard_sync": {
                    "initial_position_in_stream": "AT_TIMESTAMP",
                    "initial_timestamp": "2026-01-31T12:00:00+00:00",
                }
            }
        },
        {"spark_config": {"spark.executor.memory": "4g"}},
    ):
        make(**changes)


def test_every_default_passes_its_own_check():
    made = ConsumerSettings(application_name="orders", streams=("orders",))
    assert ConsumerSettings.model_validate(made.model_dump()) == made


def numbers():
    """The names of all settings whose default is a number."""
    made = ConsumerSettings(application_name="abc", streams=("s",)).model_dump()
    for name in setting_names(ConsumerSettings):
        group, _, setting = name.partition(".")
        default = made[group][setting] if setting else None
        if isinstance(default, int | float) and not isinstance(default, bool):
            yield name


@pytest.mark.parametrize("name", numbers())
@pytest.mark.parametrize("value", ["x", None, [], -(10**40), 10**40, math.nan])
def test_no_numeric_setting_takes_nonsense_without_a_sentence(name, value):
    group, _, setting = name.partition(".")
    try:
        made = ConsumerSettings.model_validate(
            {"application_name": "abc", "streams": ("s",), group: {setting: value}}
        )
    except ValidationError as error:
        sentence = settings_sentence(error, ConsumerSettings)
        assert f"{name}=" in sentence
        assert ". Write " in sentence
    else:
        raise AssertionError(f"{name}={getattr(getattr(made, group), setting)} is accepted")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("failover_time_milis", "failover_time_millis"),
        ("FAILOVER-TIME-MILLIS", "failover_time_millis"),
        ("max_record", "max_records"),
        ("zzz", None),
    ],
)
def test_the_nearest_name(name, expected):
    assert nearest(name, ["failover_time_millis", "max_records"]) == expected


def test_hostile_names_are_made_printable():
    assert "\x1b" not in unknown("\x1b[2J" + "x" * 10_000, ["lease"], "a setting")
    with pytest.raises(SettingsError) as caught:
        make(settings_overrides={"\x1b[2J\n": 5})
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)
