"""A real worker whose keys are replaced in the shared credentials file, and then taken away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import boto3
import pytest
from deltalake import DeltaTable

from kcl_pipeline.local import EmbeddedAws
from tests.support.credential_files import ProfileFiles
from tests.support.fleet_processes import ROOT, wait_until
from tests.support.s3_proxy import s3_proxy

PIPELINE = """
from kcl_pipeline import DeltaSink, KinesisPipeline

pipeline = KinesisPipeline(
    name="rotated",
    streams=["rotated"],
    sink=DeltaSink("s3://rotated-keys/t"),
    transform_arrow=lambda records: records.select(["data"]),
    settings_overrides={
        "lease": {"failover_time_millis": 3_000},
        "worker": {"useless_after_millis": 8_000},
    },
)
"""
USELESS = 5
SECONDS = 90.0


@pytest.mark.processes
def test_replaced_keys_need_no_restart_and_keys_that_stay_invalid_end_the_worker(
    tmp_path: Path,
) -> None:
    (tmp_path / "rotated.py").write_text(PIPELINE)
    files = ProfileFiles(tmp_path)
    files.write("OLD")
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
    with EmbeddedAws() as aws, s3_proxy(aws.endpoint_url) as proxy:
        direct = {
            "AWS_ENDPOINT_URL": aws.endpoint_url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
        }
        s3 = boto3.client("s3", endpoint_url=aws.endpoint_url, **keys)
        s3.create_bucket(Bucket="rotated-keys")
        kinesis = boto3.client("kinesis", endpoint_url=aws.endpoint_url, **keys)
        kinesis.create_stream(StreamName="rotated", ShardCount=1)
        sent: list[bytes] = []

        def put(data: bytes) -> None:
            kinesis.put_record(StreamName="rotated", Data=data, PartitionKey="k")
            sent.append(data)

        def committed() -> list[bytes]:
            objects = s3.list_objects_v2(Bucket="rotated-keys", Prefix="t/_delta_log/")
            if not any(one["Key"].endswith(".json") for one in objects.get("Contents", ())):
                return []
            table = DeltaTable("s3://rotated-keys/t", storage_options=direct)
            return sorted(table.to_pyarrow_table()["data"].to_pylist())

        environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        environment |= files.environment()
        environment |= {"AWS_ENDPOINT_URL": proxy.url, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
        arguments = [sys.executable, "-m", "kcl_pipeline.cli", "worker", "-p", "rotated:pipeline"]
        proxy.keys = frozenset({"OLD"})
        with (tmp_path / "log").open("w") as log:
            worker = subprocess.Popen(
                arguments, env=environment, cwd=tmp_path, stdout=log, stderr=log
            )
        try:
            put(b"before")
            wait_until(lambda: committed() == sorted(sent), SECONDS, "the first record")
            proxy.keys = frozenset({"NEW"})
            wait_until(
                lambda: "ExpiredToken" in (tmp_path / "log").read_text(), SECONDS, "a refusal"
            )
            files.replace("NEW")
            put(b"after")
            wait_until(lambda: committed() == sorted(sent), SECONDS, "the record after it")
            assert worker.poll() is None
            proxy.keys = frozenset({"NOBODY"})
            assert worker.wait(SECONDS) == USELESS
        finally:
            worker.kill()
            worker.wait(10)
        text = (tmp_path / "log").read_text()
        assert "could neither read, renew nor commit for" in text
        assert "ExpiredToken" in text.splitlines()[-1]
        assert committed() == sorted(sent), "each record once"
