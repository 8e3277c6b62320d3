"""The interfaces of Dagster and PySpark that are not public: a list, and that each one exists.

The hosted CI runs this test with each supported minor version.
"""

from __future__ import annotations

import ast
import functools
import importlib
from dataclasses import fields
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from botocore.endpoint import Endpoint
from botocore.eventstream import EventStream
from botocore.model import StructureShape
from dagster_aws.utils import ResourceWithBoto3Configuration

from kcl_pipeline.aws import SessionOptions

PRODUCT = Path(__file__).parents[2] / "kcl_pipeline"
LIBRARIES = ("dagster", "pyspark", "py4j")
IMPORTS = {
    # The base class of the resources of dagster-aws; its module has no page in the API reference.
    "dagster_aws.utils": {"ResourceWithBoto3Configuration"},
    # What `dagster.Resolvable` does for a class, without creating an object of that class.
    "dagster.components.resolved.base": {"derive_model_type", "resolve_fields"},
    # `asset_attributes` of the component, as in other components of Dagster.
    "dagster.components.resolved.core_models": {"AssetsDefUpdateKwargs"},
    # Transforms of a script are sent to the executors by value.
    "pyspark": {"cloudpickle"},
    # Schemas of Arrow and Spark. Spark 4 has no public equivalent.
    "pyspark.sql.pandas.types": {"from_arrow_schema", "to_arrow_schema"},
    # Errors of the gateway that PySpark does not translate, and a call whose errors it does not.
    "py4j.protocol": {
        "CALL_COMMAND_NAME",
        "END_COMMAND_PART",
        "Py4JError",
        "Py4JJavaError",
        "get_command_part",
        "get_return_value",
    },
}
"""Names by module."""
ATTRIBUTES = {
    # botocore: a response is read with a deadline and a limit of bytes.
    "aws_calls.py": {"_content", "_send"},
    "kinesis/boto.py": {"_content", "_send"},
    # botocore: events of a subscription are read one at a time.
    "kinesis/fan_out/boto.py": {"_event_generator", "_raw_stream"},
    "kinesis/fan_out/http2.py": {"_raw_stream"},
    # PySpark: the JVM, whose Janino compiles a class; the folder for its files; whether the
    # session encrypts them.
    "spark/arrow_memory/classes.py": {"_encryption_enabled", "_jvm", "_temp_dir"},
    # PySpark: the plan of a result; the folder for its files.
    "spark/arrow_memory/results.py": {"_jdf", "_temp_dir"},
    # PySpark: a job for some partitions, and the outcomes of its tasks.
    "spark/failures/probes.py": {"_gateway", "_gateway_client", "_get_object_id", "_jdf", "_jsc"},
    # PySpark: the level of a logger of the JVM.
    "spark/session.py": {"_jvm"},
    # A copy of the class itself.
    "testing/tables.py": {"_store"},
}
"""Private attributes of other objects, by file. The linter requires a comment for each."""
PUBLIC = {
    "dagster",
    "dagster.components",
    "dagster_pipes",
    "dagster_pyspark",
    "pyspark.errors",
    "pyspark.sql",
    "pyspark.sql.datasource",
    "pyspark.sql.streaming.datasource",
    "pyspark.sql.types",
}
"""Modules with a page in the API reference of their library."""


@functools.cache
def trees() -> list[tuple[str, ast.Module]]:
    return [
        (path.relative_to(PRODUCT).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(PRODUCT.rglob("*.py"))
    ]


def imported() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LIBRARIES):
                found.setdefault(node.module or "", set()).update(n.name for n in node.names)
    return found


def test_every_private_import_is_in_the_list() -> None:
    found = imported()
    found["pyspark"] -= {"__version__", "TaskContext"}
    private = {module: names for module, names in found.items() if module not in PUBLIC}
    assert private == IMPORTS


def test_every_private_attribute_is_in_the_list() -> None:
    found: dict[str, set[str]] = {}
    for name, tree in trees():
        lines = (PRODUCT / name).read_text(encoding="utf-8").splitlines()
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr.startswith("_")
                and "SLF001" in lines[(node.end_lineno or 1) - 1]
                and not (isinstance(node.value, ast.Name) and node.value.id == "self")
            ):
                found.setdefault(name, set()).add(node.attr)
    assert found == ATTRIBUTES


@pytest.mark.parametrize("module", IMPORTS)
def test_each_import_exists(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in IMPORTS[module] if not hasattr(found, name)] == []


def test_the_options_of_dagster_aws_are_those_that_reach_boto3() -> None:
    theirs = set(ResourceWithBoto3Configuration.model_fields) - {"max_attempts"}
    assert theirs == {field.name for field in fields(SessionOptions)}


def test_botocore_has_the_private_attributes() -> None:
    assert callable(Endpoint._send)
    assert AWSResponse("http://x", 200, {}, None)._content is None
    stream = EventStream(
        BytesIO(), StructureShape("events", {"type": "structure"}), None, "SubscribeToShard"
    )
    assert stream._raw_stream is not None
    assert stream._event_generator is not None


@pytest.mark.spark
def test_spark_has_the_private_attributes(spark: Any) -> None:
    context = spark.sparkContext
    assert context._jvm.org.apache.logging.log4j.core.config.Configurator.setLevel is not None
    assert len(context._gateway.new_array(context._gateway.jvm.int, 1)) == 1
    assert isinstance(context._encryption_enabled, bool)
    assert isinstance(context._temp_dir, str)
    frame = spark.range(3)
    assert frame._jdf.queryExecution().analyzed() is not None
    assert frame._jdf.toJavaRDD().count() == 3
