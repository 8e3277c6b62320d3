"""`streams=` with a configuration for each stream."""

from datetime import UTC, datetime

import pytest

from kcl_pipeline import (
    ConsumerSettings,
    DeltaSink,
    KinesisPipeline,
    SettingsError,
    StreamConfig,
    StreamSelector,
)
from kcl_pipeline.config import StreamSettings
from kcl_pipeline.orchestration.resources import AwsResource, LeaseTableResource
from kcl_pipeline.shards import StreamId

SINK = DeltaSink("lake/x")
ARN = "arn:aws:kinesis:eu-west-1:{}:stream/orders"
ONE, TWO = ARN.format("111111111111"), ARN.format("222222222222")
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def pipeline(*streams, **overrides):
    return KinesisPipeline("app", streams, SINK, settings_overrides=overrides)


def test_each_stream_has_its_position():
    settings = pipeline(
        "orders",
        StreamConfig(TWO, "LATEST"),
        StreamConfig("clicks", "AT_TIMESTAMP", NOON),
        shard_sync={"initial_position_in_stream": "TRIM_HORIZON"},
    ).settings
    assert settings.streams == ("orders", TWO, "clicks")
    starts = {
        stream: settings.shard_sync_of(stream)
        for stream in (
            StreamId("orders", "111111111111", 1, ONE),
            StreamId("orders", "222222222222", 1, TWO),
            StreamId("clicks", "111111111111", 1),
        )
    }
    assert [(one.initial_position_in_stream, one.initial_timestamp) for one in starts.values()] == [
        ("TRIM_HORIZON", None),
        ("LATEST", None),
        ("AT_TIMESTAMP", NOON),
    ]


def test_consumers_of_one_stream_name_in_two_accounts():
    arns = [f"{arn}/consumer/app:1" for arn in (ONE, TWO)]
    settings = pipeline(
        StreamConfig("orders", consumer_arn=arns[0]),
        StreamConfig(TWO, consumer_arn=arns[1]),
        retrieval={"retrieval_mode": "fan_out"},
    ).settings
    assert settings.consumers_by_stream == dict(zip((ONE, TWO), arns, strict=True))
    older = pipeline(
        "orders", TWO, retrieval={"consumer_arns": {"orders": arns[0], TWO: arns[1]}}
    ).settings
    assert older.consumers_by_stream == settings.consumers_by_stream


def test_a_resource_of_dagster_keeps_the_settings():
    settings = pipeline("orders", StreamConfig("clicks", "AT_TIMESTAMP", NOON)).settings
    assert LeaseTableResource.of(settings, AwsResource()).settings() == settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name_or_arn": "a b"}, "StreamConfig name_or_arn='a b' is not a stream."),
        ({"initial_position": "latest"}, "is not one of its values. Did you mean 'LATEST'?"),
        ({"timestamp": NOON}, "does not fit initial_position=None. Write a time and"),
        ({"initial_position": "AT_TIMESTAMP"}, "timestamp=None does not fit initial_position="),
        (
            {"initial_position": "AT_TIMESTAMP", "timestamp": NOON.replace(tzinfo=None)},
            "is not a time with a time zone.",
        ),
        ({"consumer_arn": ONE}, "is not the ARN of a consumer. Write arn:aws:kinesis:"),
        (
            {"name_or_arn": TWO, "consumer_arn": f"{ONE}/consumer/c:1"},
            "is a consumer of another stream than",
        ),
        ({"position": "LATEST"}, "position is not an argument of StreamConfig."),
    ],
)
def test_wrong_values_are_refused(values, message):
    with pytest.raises(SettingsError) as failure:
        StreamConfig(**{"name_or_arn": "orders"} | values)
    assert message in str(failure.value)


def test_contradictions_with_other_settings_are_refused():
    consumer = StreamConfig("orders", consumer_arn=f"{ONE}/consumer/c:1")
    with pytest.raises(SettingsError, match="is not used with retrieval"):
        pipeline(consumer)
    with pytest.raises(SettingsError, match="names a stream twice"):
        pipeline("orders", StreamConfig("orders"))
    with pytest.raises(SettingsError, match=r"Write streams=\[StreamConfig"):
        KinesisPipeline("app", StreamConfig("orders"), SINK)
    with pytest.raises(SettingsError, match="is set by the argument streams"):
        pipeline("orders", stream_settings={})
    with pytest.raises(SettingsError, match="is a consumer of another stream"):
        pipeline("clicks", retrieval={"consumer_arns": {"clicks": f"{ONE}/consumer/c:1"}})
    with pytest.raises(ValueError, match="is not in streams="):
        ConsumerSettings(
            application_name="app", streams=("a",), stream_settings={"b": StreamSettings()}
        )


def test_a_function_or_selector_selects_the_streams():
    for streams in (lambda: ["a"], StreamSelector("orders-")):
        selecting = KinesisPipeline("app", streams, SINK)
        assert (selecting.settings.streams, selecting.settings.is_multi_stream) == ((), True)
        assert "streams=" in repr(selecting)
        of_table = LeaseTableResource.of(selecting.settings, AwsResource()).settings()
        assert of_table == selecting.settings
        assert selecting.definitions() is not None
    with pytest.raises(SettingsError, match="cannot be called with 0 arguments"):
        KinesisPipeline("app", lambda account: [account], SINK)
    with pytest.raises(SettingsError, match=r"streams=\(\) is empty"):
        KinesisPipeline("app", (), SINK)
