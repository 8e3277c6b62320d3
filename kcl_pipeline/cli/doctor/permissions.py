"""Check the permissions of a worker and a leader: try every API action without a change.

Writes have a condition that no row can fulfil (the key exists and does not exist). AWS checks the
permission first and then rejects the condition.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kcl_pipeline.cli.doctor.finding import ok, problem, unknown
from kcl_pipeline.errors import AccessDeniedError, AwsError, KclError, NotFoundError
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leader.streams.selection import SelectStreams, selected_streams
from kcl_pipeline.leases.aws_errors import ConditionFailed, TransactionRefused, call
from kcl_pipeline.leases.dynamodb.opening import OWNER_INDEX
from kcl_pipeline.leases.layout.layout import TableUse
from kcl_pipeline.shards import StreamId
from kcl_pipeline.status.findings import Finding
from kcl_pipeline.text import counted

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


NO_SUCH_KEY: Final = "kcl-pipeline-doctor"
_NEVER: Final = "attribute_exists(#k) AND attribute_not_exists(#k)"


Probe = tuple[str, Callable[[], object]]
"""One action on one resource, with a call of it that changes nothing."""

LEASE_ACTIONS: Final = ("GetItem", "Scan", "PutItem", "UpdateItem", "DeleteItem", "Query")
WORKER_METRICS_ACTIONS: Final = ("GetItem", "Scan", "UpdateItem", "DeleteItem")
COORDINATOR_ACTIONS: Final = (
    "GetItem",
    "ConditionCheckItem",
    "PutItem",
    "UpdateItem",
    "DeleteItem",
)
"""The actions on each kind of row, except CreateTable and UpdateTable (docs/iam.md)."""


def actions_on(use: TableUse) -> tuple[str, ...]:
    """Return the actions on a table, without repetition."""
    kinds = (
        (use.has_leases, LEASE_ACTIONS),
        (use.has_workers, WORKER_METRICS_ACTIONS),
        (use.has_state, COORDINATOR_ACTIONS),
    )
    return tuple(dict.fromkeys(one for is_used, actions in kinds if is_used for one in actions))


def table_probes(
    client: DynamoDBClient, table: str, key_name: str, actions: Sequence[str]
) -> Iterator[Probe]:
    """One call of each of these actions that changes nothing."""
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
        if action == "ConditionCheckItem":
            method: Callable[..., Any] = client.transact_write_items
            check = {"TableName": table, "Key": key, **never}
            request: dict[str, Any] = {"TransactItems": [{"ConditionCheck": check}]}
        else:
            method, request = calls[action]
            request = {"TableName": table, **request}
        yield f"dynamodb:{action}", partial(call, method, action, table, **request)


def probe_all(subject: str, probes: Iterator[Probe]) -> Iterator[Finding]:
    """Return one finding if all actions are allowed, otherwise one per action that failed."""
    allowed: list[str] = []
    has_failed = False
    for action, try_it in probes:
        found = _probe(subject, action, try_it)
        if found is None:
            allowed.append(action)
        else:
            has_failed = True
            yield found
    if allowed and not has_failed:
        yield ok(subject, f"allowed: {', '.join(allowed)}")


def _probe(subject: str, action: str, try_it: Callable[[], object]) -> Finding | None:
    try:
        try_it()
    except (ConditionFailed, TransactionRefused):
        return None
    except AccessDeniedError as error:
        return problem(
            subject,
            f"{action} is denied: {error}",
            f"allow {action} on {subject} in the IAM policy of these credentials",
        )
    except NotFoundError:
        return problem(
            subject,
            f"{action}: the resource does not exist",
            "start a worker, which creates the tables and the index; create streams yourself",
        )
    except AwsError as error:
        return problem(
            subject,
            f"{action} fails: {error}",
            "try again; if it fails again, check the AWS health status and the network",
        )
    return None


def selection_findings(select: SelectStreams) -> Generator[Finding, None, tuple[str, ...]]:
    """Select the streams once, as the leader does every minute.

    Returns:
        The streams. Empty if the selection fails.
    """
    try:
        names = selected_streams(select)
    except AccessDeniedError as error:
        yield problem(
            "selection of streams",
            str(error),
            f"allow kinesis:{error.operation} in the IAM policy of these credentials",
        )
    except Exception as error:  # noqa: BLE001 (the function may be the user's)
        yield problem(
            "selection of streams",
            f"{type(error).__name__}: {error}",
            "correct the argument `streams`; until then, the recorded streams are read",
        )
    else:
        yield ok(
            "selection of streams", f"{counted(len(names), 'stream')}: {', '.join(names[:20])}"
        )
        return names
    return ()


def stream_findings(
    kinesis: KinesisClient, name: str, *, multi_stream: bool
) -> Generator[Finding, None, StreamId | None]:
    """Check the actions that a reader needs on a stream.

    Describes the stream, lists its shards, gets an iterator at the end of a shard, and reads at
    most one record.

    Returns:
        The stream. None: it cannot be read.
    """
    subject = f"stream {name}"
    others = "; the other streams are read on" if multi_stream else ""
    try:
        stream = kinesis.resolve_stream(name, multi_stream=multi_stream)
        shards = kinesis.list_shards(stream)
        shard = next((shard for shard in shards if shard.is_open), None)
        if shard is None:
            yield unknown(
                subject,
                "kinesis:GetShardIterator and kinesis:GetRecords were not checked: no shard is "
                "open",
            )
            return stream
        iterator = kinesis.get_shard_iterator(stream, shard.shard_id, "LATEST")
        kinesis.get_records(stream, shard.shard_id, iterator, 1)
    except AccessDeniedError as error:
        yield problem(
            subject,
            str(error),
            f"allow kinesis:{error.operation} on the stream in the IAM policy of these credentials"
            f"{others}",
        )
    except NotFoundError as error:
        yield problem(
            subject,
            str(error),
            "check the stream's name, AWS_REGION and AWS_ENDPOINT_URL, or create the stream"
            f"{others}",
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
            f"{sum(not shard.is_open for shard in shards)} closed within the retention period",
        )
        return stream
    return None
