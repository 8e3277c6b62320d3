"""What Delta needs of S3, and the other services, requested through boto3 from the embedded AWS."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest
from botocore.exceptions import ClientError
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

from kcl_pipeline.local import EmbeddedAws
from tests.support.local_aws import client


def test_s3_takes_an_object_once(aws: EmbeddedAws) -> None:
    s3 = client(aws, "s3")
    s3.create_bucket(Bucket="s3-a")
    s3.put_object(
        Bucket="s3-a",
        Key="log/00 ü.json",
        Body=b"one",
        IfNoneMatch="*",
        Metadata={"who": "me"},
    )
    with pytest.raises(ClientError) as caught:
        s3.put_object(Bucket="s3-a", Key="log/00 ü.json", Body=b"two", IfNoneMatch="*")
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
    answer = s3.get_object(Bucket="s3-a", Key="log/00 ü.json")
    assert (answer["Body"].read(), answer["Metadata"]) == (b"one", {"who": "me"})
    assert s3.head_object(Bucket="s3-a", Key="log/00 ü.json")["ContentLength"] == 3
    assert [o["Key"] for o in s3.list_objects_v2(Bucket="s3-a", Prefix="log/")["Contents"]] == [
        "log/00 ü.json"
    ]
    big = bytes(range(256)) * 40_000
    s3.put_object(Bucket="s3-a", Key="big", Body=big)
    assert s3.get_object(Bucket="s3-a", Key="big", Range="bytes=256-511")["Body"].read() == bytes(
        range(256)
    )
    s3.delete_object(Bucket="s3-a", Key="log/00 ü.json")
    with pytest.raises(ClientError, match="404"):
        s3.head_object(Bucket="s3-a", Key="log/00 ü.json")


def test_delta_tables_live_in_s3(aws: EmbeddedAws) -> None:
    client(aws, "s3").create_bucket(Bucket="s3-delta")
    options = aws.environment() | {"AWS_CONDITIONAL_PUT": "etag"}
    lost: list[int] = []

    def append(writer: int) -> None:
        try:
            write_deltalake(
                "s3://s3-delta/t",
                pa.table({"writer": [writer]}),
                mode="append",
                storage_options=options,
            )
        except (
            CommitFailedError
        ):  # it may give up under contention; what matters is that none is lost silently
            lost.append(writer)

    append(-1)
    threads = [threading.Thread(target=append, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    rows = (
        DeltaTable("s3://s3-delta/t", storage_options=options)
        .to_pyarrow_table()["writer"]
        .to_pylist()
    )
    assert sorted(rows) == sorted({-1, 0, 1, 2, 3} - set(lost))
    assert len(rows) >= 2


def test_identity_and_metrics(aws: EmbeddedAws) -> None:
    # the first account that no other embedded AWS of this process uses
    account = client(aws, "sts").get_caller_identity()["Account"]
    assert account == aws._moto.account
    assert 123456789012 <= int(account) < 123456789112
    cloudwatch = client(aws, "cloudwatch")
    cloudwatch.put_metric_data(
        Namespace="KCL",
        MetricData=[{"MetricName": "RecordsProcessed", "Value": 5.0, "Unit": "Count"}],
    )
    assert [m["MetricName"] for m in cloudwatch.list_metrics(Namespace="KCL")["Metrics"]] == [
        "RecordsProcessed"
    ]
