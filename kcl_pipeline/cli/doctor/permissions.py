"""Whether the credentials may do what a worker and a leader do: every API action is tried by a call
that changes nothing.

Writes carry a condition that no row can fulfil (the key is there and is not there): AWS checks the
permission first, then refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kcl_pipeline.cli.doctor.finding import Finding, ok, problem, unknown
from kcl_pipeline.errors import AccessDeniedError, AwsError, KclError, NotFoundError
from kcl_pipeline.leases.aws_errors import ConditionFailed, call
from kcl_pipeline.leases.dynamodb.leases import OWNER_INDEX

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

    from kcl_pipeline.kinesis.client import KinesisClient

NO_SUCH_KEY: Final = "kcl-pipeline-doctor"
_NEVER: Final = "attribute_exists(#k) AND attribute_not_exists(#k)"


@dataclass(frozen=True, slots=True)
class Probe:
    """One action on one resource, and a harmless call of it."""

    action: str
    call: Callable[[], object]


LEASE_ACTIONS: Final = ("GetItem", "Scan", "PutItem", "UpdateItem", "DeleteItem", "Query")
WORKER_METRICS_ACTIONS: Final = ("GetItem", "Scan", "UpdateItem", "DeleteItem")
COORDINATOR_ACTIONS: Final = ("GetItem", "PutItem", "UpdateItem", "DeleteItem")
"""What is done to each table, but creating and changing the table itself (docs/iam.md)."""


def table_probes(
    client: DynamoDBClient, table: str, key_name: str, actions: Sequence[str]
) -> Iterator[Probe]:
    """A harmless call of each of these actions."""
    key, never = (
        {key_name: {"S": NO_SUCH_KEY}},
        {"ConditionExpression": _NEVER, "ExpressionAttributeNames": {"#k": key_name}},
    )
    query = {
        "IndexName": OWNER_INDEX.name,
        "KeyConditionExpression": "#o = :o",
        "ExpressionAttributeNames": {"#o": OWNER_INDEX.hash_name},
        "ExpressionAttributeValues": {":o": {"S": NO_SUCH_KEY}},
        "Limit": 1,
    }
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "GetItem": (client.get_item, {"Key": key}),
        "Scan": (client.scan, {"Limit": 1}),
        "PutItem": (client.put_item, {"Item": key, **never}),
        "UpdateItem": (client.update_item, {"Key": key, **never}),
        "DeleteItem": (client.delete_item, {"Key": key, **never}),
        "Query": (client.query, query),
    }
    for action in actions:
        method, request = calls[action]
        yield Probe(
            f"dynamodb:{action}", partial(call, method, action, table, TableName=table, **request)
        )


def try_all(subject: str, probes: Iterator[Probe]) -> Iterator[Finding]:
    """One finding when all are allowed, else one for each that is not."""
    allowed: list[str] = []
    bad = False
    for probe in probes:
        found = _try(subject, probe)
        if found is None:
            allowed.append(probe.action)
        else:
            bad = True
            yield found
    if allowed and not bad:
        yield ok(subject, f"allowed: {', '.join(allowed)}")


def _try(subject: str, probe: Probe) -> Finding | None:
    try:
        probe.call()
    except ConditionFailed:
        return None
    except AccessDeniedError as error:
        return problem(
            subject,
            f"{probe.action} is denied: {error}",
            f"allow {probe.action} on {subject} in the policy of these credentials",
        )
    except NotFoundError:
        return problem(
            subject,
            f"{probe.action}: there is no such thing",
            "start a worker, which creates tables and index; streams are created by their owner",
        )
    except AwsError as error:
        return problem(
            subject,
            f"{probe.action} fails: {error}",
            "try again; if it stays, look at the service's health and the network",
        )
    return None


def stream_findings(kinesis: KinesisClient, name: str, *, multi_stream: bool) -> Iterator[Finding]:
    """What a reader does to a stream: describe it, list its shards, take an iterator at the tip,
    read at most one record.
    """
    subject = f"stream {name}"
    try:
        stream = kinesis.resolve_stream(name, multi_stream=multi_stream)
        shards = kinesis.list_shards(stream)
        tip = next((shard for shard in shards if shard.is_open), None)
        if tip is None:
            yield unknown(
                subject,
                "kinesis:GetShardIterator and kinesis:GetRecords were not tried: no shard is open",
            )
            return
        kinesis.get_records(
            stream, tip.shard_id, kinesis.get_shard_iterator(stream, tip.shard_id, "LATEST"), 1
        )
    except AccessDeniedError as error:
        yield problem(
            subject,
            str(error),
            f"allow kinesis:{error.operation} on the stream in the policy of these credentials",
        )
    except NotFoundError as error:
        yield problem(
            subject,
            str(error),
            "check the stream's name, AWS_REGION and AWS_ENDPOINT_URL, or create the stream",
        )
    except KclError as error:
        yield problem(
            subject,
            str(error),
            "check the setting `streams`, AWS_REGION, AWS_ENDPOINT_URL and the network",
        )
    else:
        yield ok(
            subject,
            "allowed: kinesis:DescribeStreamSummary, kinesis:ListShards, "
            "kinesis:GetShardIterator, kinesis:GetRecords",
        )
        yield ok(
            subject,
            f"{sum(shard.is_open for shard in shards)} shards are open, "
            f"{sum(not shard.is_open for shard in shards)} closed in retention",
        )
