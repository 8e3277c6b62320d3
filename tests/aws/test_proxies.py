"""A client of an endpoint on this host uses no proxy, and is made twice only for that."""

from __future__ import annotations

import boto3
import pytest
from botocore.config import Config

from kcl_pipeline.aws.configs import without_proxy

HERE, ELSEWHERE = "http://127.0.0.1:9", "http://kinesis.example:9"


@pytest.mark.parametrize(
    ("url", "proxy", "proxies"),
    [
        (HERE, None, [None]),
        (HERE, "http://proxy.example:3128", [None, {}]),
        (ELSEWHERE, "http://proxy.example:3128", [None]),
    ],
)
def test_a_client_is_made_again_without_a_proxy_that_it_must_not_use(
    url, proxy, proxies, monkeypatch
):
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    if proxy is not None:
        monkeypatch.setenv("HTTP_PROXY", proxy)
    made = []

    def make(config):
        made.append(config.proxies)
        return boto3.client(
            "kinesis",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="k",
            aws_secret_access_key="s",
            config=config,
        )

    assert without_proxy(make, Config()).meta.endpoint_url == url
    assert made == proxies
