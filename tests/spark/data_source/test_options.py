"""Options and offsets of the data source."""

from __future__ import annotations

import json

import pytest

from kcl_pipeline.errors import SettingsError
from kcl_pipeline.position import TRIM_HORIZON, Position
from kcl_pipeline.spark.data_source import source
from kcl_pipeline.spark.data_source.offsets import ShardOffset, offset_from_json, offset_to_json
from kcl_pipeline.spark.data_source.options import check_mode, parse_options


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "neither streamName nor streamArn is set; write option"),
        (
            {"streamName": "a", "streamArn": "arn:aws:kinesis:r:1:stream/a"},
            "streamName and streamArn are both set",
        ),
        ({"streamName": "a,a"}, "option streamName='a,a' names no stream, or one twice"),
        (
            {"streamName": "a", "path": "b"},
            r"load\('b'\) names a path, which format\('kinesis'\) does not have; write option",
        ),
        (
            {"streamName": "a", "endpoint": "http://x"},
            "option endpoint='http://x' is not known. Did you mean endpointUrl",
        ),
        (
            {"streamName": "a", "zzzzzzzz": "1"},
            "option zzzzzzzz='1' is not known. Write one of accessKeyId, ",
        ),
        (
            {"streamName": "a", "maxRecordsPerTrigger": "0"},
            (
                "option maxRecordsPerTrigger='0' cannot be used. Write a whole number of "
                "records, 1 or more"
            ),
        ),
        (
            {"streamName": "a", "maxrecordspertrigger": "x"},
            "option maxRecordsPerTrigger='x' cannot be used. Write a whole number",
        ),
        (
            {"streamName": "a", "maxBytesPerTrigger": "10 apples"},
            "option maxBytesPerTrigger='10 apples' cannot be used. Write a size such as 64m",
        ),
        (
            {"streamName": "a", "endpointUrl": "localhost"},
            "option endpointUrl='localhost' cannot be used. Write http",
        ),
        (
            {"streamName": "a", "startingPosition": "earliest"},
            "option startingPosition='earliest' cannot be used. Write TRIM_HORIZON, LATEST, ",
        ),
        (
            {"streamName": "a", "startingPosition": "AT_TIMESTAMP 2026-01-01T00:00"},
            (
                r"option startingPosition=.* cannot be used \('2026-01-01T00:00' has no time "
                r"zone\). Write"
            ),
        ),
        (
            {"streamName": "a", "startingPosition": '{"a": {"s-0": {"sequenceNumber": "x"}}}'},
            (
                r"option startingPosition=.* cannot be used \(s-0: 'x' is neither a Kinesis "
                r"sequence number"
            ),
        ),
        (
            {"streamName": "a", "startingPosition": "{"},
            r"option startingPosition='{' cannot be used \(it is not JSON",
        ),
        (
            {"streamName": "a", "endingPosition": "TRIM_HORIZON"},
            "option endingPosition='TRIM_HORIZON' would end before the first record; write LATEST",
        ),
        (
            {"streamName": "a", "accessKeyId": "k"},
            "option secretAccessKey is not set; write both",
        ),
        (
            {"streamName": "a", "failOnDataLoss": "perhaps"},
            "option failOnDataLoss='perhaps' cannot be used. Write true or false",
        ),
    ],
)
def test_a_wrong_option_says_what_to_write(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=f"^{sentence}"):
        parse_options(options)


def test_a_secret_is_not_in_the_sentence() -> None:
    with pytest.raises(SettingsError) as caught:
        parse_options({"streamName": "a", "accessKeyId": "k", "secretAccessKey": ""})
    assert (
        str(caught.value)
        == "option secretAccessKey=… cannot be used. Write a secret access key, together "
        "with accessKeyId."
    )
    assert "hunter2" not in repr(
        parse_options(
            {
                "streamName": "a",
                "accessKeyId": "k",
                "secretAccessKey": "hunter2",
                "sessionToken": "hunter2",
            }
        )
    )


def test_options_as_spark_people_write_them() -> None:
    options = parse_options(
        {
            "STREAMNAME": "a, b",
            "maxbytespertrigger": "2m",
            "failOnDataLoss": "FALSE",
            "startingPosition": "trim_horizon",
        }
    )
    assert (options.streams, options.max_bytes_per_trigger, options.fail_on_data_loss) == (
        ("a", "b"),
        2 * 1024 * 1024,
        False,
    )
    assert options.starting_position.kind == "TRIM_HORIZON"


def test_options_of_the_other_mode() -> None:
    given = {"streamName": "a", "maxRecordsPerTrigger": "5"}
    with pytest.raises(
        SettingsError,
        match=r"option maxRecordsPerTrigger is for spark.readStream; remove it, or limit "
        r"a batch by endingPosition",
    ):
        check_mode(parse_options(given), given, "batch")
    given = {"streamName": "a", "startingPosition": "LATEST"}
    check_mode(parse_options(given), given, "stream")
    with pytest.raises(SettingsError, match="startingPosition='LATEST' leaves nothing to read"):
        check_mode(parse_options(given), given, "batch")


def test_offsets_survive_spark_s_log() -> None:
    offset = {
        "b": {
            "shardId-1": ShardOffset(Position("123", 4), None, "120", 5, ended=True),
            "shardId-0": ShardOffset(TRIM_HORIZON),
        },
        "a": {"shardId-0": ShardOffset(Position("AT_TIMESTAMP"), 17)},
    }
    text = json.dumps(offset_to_json(offset))
    assert offset_from_json(json.loads(text)) == offset
    assert json.dumps(offset_to_json(offset_from_json(json.loads(text)))) == text
    assert list(json.loads(text)["b"]) == ["shardId-0", "shardId-1"]


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {},
        {"a": 1},
        {"a": {"s": {"x": 1}}},
        {"a": {"s": {"sequenceNumber": "AT_TIMESTAMP"}}},
        {"a": {"s": "SHARD_END"}},
    ],
)
def test_what_is_no_offset(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"offsets are written|AT_TIMESTAMP|SHARD_END"):
        offset_from_json(wrong)


def test_read_stream_of_an_older_pyspark_is_one_sentence(monkeypatch):
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    found = source.KinesisDataSource({"streamName": "orders", "region": "eu-central-1"})
    with pytest.raises(SettingsError, match=r"needs PySpark 4\.2, and this is \d+\.\d+"):
        found.streamReader(found.schema())
    assert found.reader(found.schema()) is not None
