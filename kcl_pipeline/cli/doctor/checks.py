"""Check Java and the tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kcl_pipeline.cli.doctor.finding import ok, problem, warning
from kcl_pipeline.errors import KclError, NotFoundError, SettingsError
from kcl_pipeline.leases.aws_errors import call
from kcl_pipeline.leases.dynamodb.opening import OWNER_INDEX
from kcl_pipeline.spark.java import require_java, require_user_name
from kcl_pipeline.status.findings import Finding

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


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
        return warning(
            subject,
            "does not exist yet",
            "if no worker has run yet, do nothing: the first worker creates the table; "
            "otherwise check --application and AWS_REGION",
        ), False
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
