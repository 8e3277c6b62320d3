"""Check the set-up: Java, the tables, every permission of a worker and a leader, and the metrics.

Every action is tried without a change. Writes have a condition that no row can fulfil (the key
exists and does not exist). AWS checks the permission first and then rejects the condition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kcl_pipeline.aws import AwsClients
from kcl_pipeline.aws_calls import aws_errors
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import (
    AccessDeniedError,
    AwsError,
    InvalidRequestError,
    KclError,
    NotFoundError,
    SettingsError,
)
from kcl_pipeline.extras import MODULES, is_installed
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leader.streams import SelectStreams, selected_streams
from kcl_pipeline.leases.dynamodb import OWNER_INDEX, ConditionFailed, TransactionRefused, call
from kcl_pipeline.leases.layout import TableUse
from kcl_pipeline.shards import StreamId
from kcl_pipeline.spark.java import require_java, require_user_name
from kcl_pipeline.status.findings import Finding, FindingLevel
from kcl_pipeline.text import counted

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


def ok(subject: str, text: str) -> Finding:
    """The check passed."""
    return Finding(None, subject, FindingLevel.OK, text)


def warning(subject: str, text: str, advice: str) -> Finding:
    """The state may be intended."""
    return Finding(None, subject, FindingLevel.WARNING, text, advice)


def problem(subject: str, text: str, advice: str) -> Finding:
    """Records are not processed correctly until the advice is followed."""
    return Finding(None, subject, FindingLevel.PROBLEM, text, advice)


def unknown(subject: str, text: str) -> Finding:
    """The check was skipped."""
    return Finding(None, subject, FindingLevel.UNKNOWN, text)


def check_java(*, needed: bool, require: Callable[[], int] = require_java) -> Finding:
    """Check the Java version and the name of the user, which only the Spark path needs."""
    try:
        version = require()
        require_user_name()
        return ok("java", f"Java {version}")
    except SettingsError as error:
        text, _, advice = str(error).partition(": ")
        return (problem if needed else warning)("java", text, advice)


def check_table(
    client: DynamoDBClient, table: str, key_name: str, *, has_index: bool
) -> tuple[Finding, bool]:
    """Check that a table exists and has the expected key and index.

    Returns:
        The finding, and whether the table can be used.
    """
    subject = f"table {table}"
    try:
        found: Mapping[str, Any] = call(
            client.describe_table, "DescribeTable", table, TableName=table
        )["Table"]
    except NotFoundError:
        text = (
            "does not exist yet; permissions were not checked; the first worker creates it, and "
            "also needs dynamodb:CreateTable and dynamodb:UpdateTable"
        )
        return unknown(subject, text), False
    except KclError as error:
        return problem(
            subject,
            str(error),
            "allow dynamodb:DescribeTable, and check AWS_ENDPOINT_URL and the network",
        ), False
    keys = [(k["AttributeName"], k["KeyType"]) for k in found["KeySchema"]]
    if keys != [(key_name, "HASH")]:
        return problem(
            subject,
            f"has the key {keys} instead of {key_name}",
            "choose another application name, or another table name in the settings",
        ), False
    if found["TableStatus"] not in {"ACTIVE", "UPDATING"}:
        return problem(subject, f"is {found['TableStatus']}", "wait until it is ACTIVE"), False
    indexes = {
        i["IndexName"]: i.get("IndexStatus") for i in found.get("GlobalSecondaryIndexes", [])
    }
    if has_index and indexes.get(OWNER_INDEX.name) != "ACTIVE":
        state = indexes.get(OWNER_INDEX.name, "missing")
        return problem(
            subject,
            f"its index {OWNER_INDEX.name} is {state}",
            "start a worker, which creates the index, or wait until the index is ACTIVE",
        ), False
    return ok(
        subject, f"{found['TableStatus']}, key {key_name}{', with its index' if has_index else ''}"
    ), True


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
            f"{counted(sum(shard.is_open for shard in shards), 'open shard')}, "
            f"{sum(not shard.is_open for shard in shards)} closed within the retention period",
        )
        return stream
    return None


def check_metrics(settings: ConsumerSettings, clients: AwsClients) -> Iterator[Finding]:
    """One finding for each backend of `metrics_backends`; nothing is written."""
    for backend in dict.fromkeys(settings.metrics.metrics_backends):
        if backend == "cloudwatch":
            yield _check_cloudwatch(
                settings.metrics.namespace or settings.application_name, clients
            )
        elif backend in MODULES and not is_installed(backend):
            yield problem(
                f"metrics {backend}",
                f"the extra `{backend}` is not installed here: no metric is exported",
                f"pip install 'kcl-pipeline[{backend}]'",
            )
        else:
            yield ok(f"metrics {backend}", "installed")


def _check_cloudwatch(namespace: str, clients: AwsClients) -> Finding:
    """CloudWatch checks the permission first, and then rejects a value that is not a number."""
    subject, action = "metrics cloudwatch", "cloudwatch:PutMetricData"
    allowed = ok(subject, f"allowed: {action} for the namespace {namespace}")
    try:
        with aws_errors("cloudwatch", "PutMetricData", f"namespace {namespace}"):
            clients.cloudwatch.put_metric_data(
                Namespace=namespace,
                MetricData=[{"MetricName": "kcl-pipeline-doctor", "Value": math.nan}],
            )
    except InvalidRequestError:
        return allowed
    except AccessDeniedError as error:
        return problem(
            subject,
            f"{action} is denied: {error}",
            f"allow {action} for the namespace {namespace} in the IAM policy of these credentials",
        )
    except AwsError as error:
        return problem(
            subject,
            f"{action} fails: {error}",
            "try again; if it fails again, check the AWS health status and the network",
        )
    return allowed
