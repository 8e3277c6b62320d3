"""Calls of the embedded AWS without an SDK."""

from __future__ import annotations

import http.client
import json
import urllib.request
from typing import Any

from kcl_pipeline.local import EmbeddedAws


def connect(aws: EmbeddedAws) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(aws.endpoint_url.removeprefix("http://"), timeout=10)


def post(url: str, path: str, payload: Any, method: str = "POST") -> Any:
    request = urllib.request.Request(url + path, json.dumps(payload).encode(), method=method)
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.loads(response.read())


def json_call(
    connection: http.client.HTTPConnection, operation: str, body: bytes
) -> tuple[int, dict[str, Any]]:
    headers = {
        "X-Amz-Target": f"Kinesis_20131202.{operation}",
        "Content-Type": "application/x-amz-json-1.1",
    }
    connection.request("POST", "/", body, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read() or b"{}")
