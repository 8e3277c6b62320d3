"""Wrong arguments of sinks, of the definitions and of the data source: one sentence each."""

from __future__ import annotations

import math
import re

import pytest

from kcl_pipeline import CheckLimits, DeltaSink, KinesisPipeline
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.foreach import ForeachBatchSink
from kcl_pipeline.spark.data_source.options import parse_options


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"uri": 5}, "DeltaSink uri=5 is not a string. Write a path such as '/data/orders'"),
        ({"uri": " "}, "DeltaSink uri=' ' is empty. Write a path"),
        ({"uri": "lake/\n"}, "has characters that do not print. Write a path"),
        ({"uri": "lake/a%20b"}, "DeltaSink uri='lake/a%20b' contains %20, which delta-rs reads"),
        ({"uri": "s3://lake/a%2Fb"}, "DeltaSink uri='s3://lake/a%2Fb' contains %2F, which"),
        ({"uri": "file:///lake/a%2520b"}, "contains %20, which delta-rs reads as something else"),
        ({"uri": "lake\\orders"}, "contains \\, which delta-rs reads as something else. Write"),
        ({"uri": "lake/a[1]"}, "contains [, which"),
        ({"uri": "lake/a|b"}, "contains |, which"),
        ({"uri": "s3://lake/a^b"}, "contains ^, which"),
        ({"uri": "s3://lake/x?versionId=1"}, "contains a query, which logs would show"),
        ({"uri": "s3://lake/a#1"}, "contains #, which"),
        ({"uri": "s3://lake/a//b"}, "has an empty part, or one of only dots, between slashes."),
        ({"uri": "s3://lake/../b"}, "Write each folder once, as in 's3://lake/orders'."),
        ({"uri": "~nobody-of-this-host/lake"}, "cannot be resolved ("),
        ({"dead_letter_uri": "lake/a%41"}, "DeltaSink dead_letter_uri='lake/a%41' contains %41"),
        (
            {"partition_by": "day"},
            "DeltaSink partition_by='day' is a string. Write DeltaSink partition_by=['day'].",
        ),
        ({"partition_by": [5]}, "DeltaSink partition_by[0]=5 is not a string."),
        ({"partition_by": 5}, "DeltaSink partition_by=5 is not a list."),
        (
            {"storage_options": {"timeout": 5}},
            "DeltaSink storage_options['timeout'] is of type int, not a string.",
        ),
        ({"storage_options": "x"}, "DeltaSink storage_options is not a dictionary."),
        ({"dead_letter_uri": "lake/x"}, "is the table itself. Write another, or None for"),
        ({"dead_letter_uri": 5}, "DeltaSink dead_letter_uri=5 is not a string."),
        ({"schema_evolution": "yes"}, "DeltaSink schema_evolution='yes' is not True or False."),
        ({"table_properties": {"delta.x": 5}}, "table_properties['delta.x']=5 is not a string."),
        (
            {"storage_option": {}},
            "storage_option is not an argument of DeltaSink. Did you mean storage_options?",
        ),
    ],
)
def test_a_wrong_delta_sink(arguments, sentence):
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        DeltaSink(**({"uri": "lake/x"} | arguments))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"function": "f"}, "ForeachBatchSink function='f' is not a function."),
        (
            {"function": lambda frame: frame},
            "cannot be called with 2 arguments (frame, identity): it takes (frame).",
        ),
        ({"dead_letter_uri": "a%20b"}, "ForeachBatchSink dead_letter_uri='a%20b' contains %20,"),
        ({"dead_letter_uri": ""}, "ForeachBatchSink dead_letter_uri='' is empty."),
        ({"storage_options": []}, "ForeachBatchSink storage_options is not a dictionary."),
    ],
)
def test_a_wrong_foreach_batch_sink(arguments, sentence):
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        ForeachBatchSink(**({"function": lambda frame, identity: None} | arguments))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"leader_default_runing": True},
            "leader_default_runing is not an option. Did you mean leader_default_running?",
        ),
        ({"leader_default_running": "yes"}, "leader_default_running='yes' is not True or False."),
        (
            {"progress_seconds": 0},
            "progress_seconds=0 is too small. Write a time in seconds, 0.1 to 86400.",
        ),
        ({"progress_seconds": "60"}, "progress_seconds='60' is not a number."),
        ({"lag_threshold_seconds": math.inf}, "lag_threshold_seconds=inf is not a finite number."),
        (
            {"scale_up_cpu_percent": 101},
            "scale_up_cpu_percent=101 is too large. Write a percentage, 0 to 100, or None.",
        ),
        (
            {"scale_up_lag_seconds": -1},
            (
                "scale_up_lag_seconds=-1 is too small. Write a time in seconds, 0 to 31536000, "
                "or None."
            ),
        ),
        ({"group_name": "my group"}, "group_name='my group' is not a group name."),
        ({"owners": "me@example.com"}, "owners='me@example.com' is a string. Write owners=["),
        ({"tags": {"domain": 5}}, "tags['domain']=5 is not a string. Write '5'."),
        ({"check_limits": 60}, "check_limits=60 is not a CheckLimits. Write CheckLimits("),
        ({"aws": "eu-central-1"}, "aws='eu-central-1' is not an AwsResource."),
    ],
)
def test_wrong_options_of_the_definitions(options, sentence):
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        KinesisPipeline("orders", ["orders"], DeltaSink("lake/orders")).definitions(**options)


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"leader_absent_seconds": "1m"}, "leader_absent_seconds='1m' is not a number."),
        ({"dead_letters_per_hour": 0.5}, "dead_letters_per_hour=0.5 is not a whole number."),
        ({"retention_seconds": 5}, "retention_seconds is not an argument of CheckLimits."),
        (
            {"retention_warn_seconds": 3_600},
            "retention_error_seconds=10800 is more than retention_warn_seconds=3600. Write 3600",
        ),
    ],
)
def test_wrong_limits_of_checks(limits, sentence):
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        CheckLimits(**limits)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"streamNme": "x"}, "option streamNme='x' is not known. Did you mean streamName?"),
        (
            {"streamName": "orders", "startingPosition": "BEGIN"},
            "option startingPosition='BEGIN' cannot be used. Write TRIM_HORIZON, LATEST,",
        ),
        (
            {"streamName": "orders", "fetchThreads": "0"},
            "option fetchThreads='0' cannot be used. Write a whole number of threads, 1 to 256.",
        ),
        (
            {"streamName": "orders, my orders"},
            "option streamName='orders, my orders' has 'my orders', which is no stream. Write the",
        ),
        ({"streamName": "orders", "zzz": "1"}, "option zzz='1' is not known. Write one of"),
    ],
)
def test_wrong_options_of_the_data_source(options, sentence):
    with pytest.raises(SettingsError) as caught:
        parse_options(options)
    assert sentence in str(caught.value)
