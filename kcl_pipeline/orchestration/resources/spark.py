"""Configure the Spark session as a Dagster resource."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Union, cast

import dagster as dg
from pydantic import Field

from kcl_pipeline.checked_fields import CheckedFields
from kcl_pipeline.settings_errors import without_secrets, wrong

if TYPE_CHECKING:
    from dagster_pyspark import LazyPySparkResource, PySparkResource
    from pyspark.sql import SparkSession

# dagster-pyspark imports pyspark, which most runs do not need.
SparkSource: TypeAlias = Union["SparkResource", "PySparkResource", "LazyPySparkResource"]
"""A resource with a Spark session: this package's, or one of dagster-pyspark."""


class SparkResource(CheckedFields, dg.ConfigurableResource[Any]):
    """Name and properties of the Spark session.

    The session is created at its first use and shared by the process. Creation takes about five
    seconds, so that runs without Spark do not create it.
    """

    app_name: str = Field(description="Application name in Spark's UI")
    spark_config: dict[str, str] = Field(
        default_factory=dict, description="Spark properties; they override those of this package"
    )

    def session(self) -> "SparkSession":
        """Return the session of this process.

        Raises:
            errors.SettingsError: No usable Java was found.
        """
        # Loaded here, because most runs do not need pyspark.
        from kcl_pipeline.spark.session import build_session  # noqa: PLC0415

        return build_session(self.app_name, _with_secrets(self.app_name, self.spark_config))


_SECRETS: Final[dict[str, Mapping[str, str]]] = {}
"""By application name, the properties of this process that Dagster may not store."""


def spark_resource(app_name: str, spark_config: Mapping[str, str]) -> SparkResource:
    """Return the resource of a pipeline.

    Dagster stores the fields of a resource and shows them in its UI. So secrets are not in the
    fields: each process keeps those of the pipelines that it has loaded.
    """
    fields = without_secrets(spark_config)
    _SECRETS[app_name] = {key: value for key, value in spark_config.items() if fields[key] != value}
    return SparkResource(app_name=app_name, spark_config=fields)


def _with_secrets(app_name: str, fields: Mapping[str, str]) -> dict[str, str]:
    known = _SECRETS.get(app_name, {})
    return {
        key: known[key] if key in known and value == without_secrets(known)[key] else value
        for key, value in fields.items()
    }


def open_session(resource: SparkSource) -> "SparkSession":
    """Return the session of a resource.

    A session of dagster-pyspark gets the settings of this package that can change at run time,
    except those that its resource sets.

    Raises:
        errors.SettingsError: No usable Java was found.
    """
    # Not `hasattr(resource, "spark_session")`, which would create a lazy session.
    found: Any = resource
    if hasattr(type(found), "session"):
        return cast("SparkSession", found.session())
    from kcl_pipeline.spark.session import adopt_session, prepare_process  # noqa: PLC0415

    prepare_process()
    return adopt_session(found.spark_session)


def check_spark(resource: object) -> None:
    """Check the argument `spark` of `definitions`.

    Raises:
        errors.SettingsError: It has no Spark session.
    """
    if isinstance(resource, SparkResource):
        return
    from dagster_pyspark import LazyPySparkResource, PySparkResource  # noqa: PLC0415 (as above)

    if not isinstance(resource, PySparkResource | LazyPySparkResource):
        raise wrong(
            "spark",
            resource,
            "has no Spark session",
            "Write SparkResource(...), PySparkResource(...) or LazyPySparkResource(...), or None",
        )
