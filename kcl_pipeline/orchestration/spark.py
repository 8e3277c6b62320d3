"""Get the Spark session of a worker from a resource of dagster-pyspark.

This module loads pyspark, which most runs do not need. It is therefore imported where it is used.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from dagster_pyspark import LazyPySparkResource, PySparkResource
from pydantic import Field, PrivateAttr

from kcl_pipeline.arguments import check_options
from kcl_pipeline.checked_fields import CheckedFields
from kcl_pipeline.settings_errors import wrong
from kcl_pipeline.spark import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SparkSource: TypeAlias = LazyPySparkResource | PySparkResource
"""A resource with a Spark session: of this package or of dagster-pyspark."""

_HIDDEN: Final = "***"
_VALUES: Final[dict[str, dict[str, str]]] = {}
"""By application name, the properties that resources of this process were created with."""


class SparkResource(CheckedFields, LazyPySparkResource):
    """A `LazyPySparkResource` of dagster-pyspark whose session has the settings of this package.

    The session is created at its first use and shared by the process. An op of yours gets it as
    `spark_session`, also if its argument is annotated as a `LazyPySparkResource`.

    Dagster stores the fields of a resource and shows them in its UI, and any property may be a
    secret. So the field has the names of the properties only. Each process keeps the values of the
    resources that its code creates. An `EnvVar` stays what it is.

    Example:
        >>> from kcl_pipeline import SparkResource
        >>> spark = SparkResource(app_name="shop", spark_config={"spark.driver.memory": "4g"})
    """

    app_name: str = Field(description="Application name in Spark's UI")
    spark_config: dict[str, str] = Field(
        default_factory=dict,
        description="Spark properties; they override those of this package. Values are not shown",
    )
    _values: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, **given: Any) -> None:
        config, values = given.get("spark_config"), dict[str, str]()
        if config is not None:
            check_options("spark_config", config, "{'spark.executor.memory': '4g'}", hidden=True)
            # An EnvVar is a subclass of str
            values = {k: v for k, v in config.items() if type(v) is str and v != _HIDDEN}
            given["spark_config"] = {k: _HIDDEN if k in values else v for k, v in config.items()}
        super().__init__(**given)
        self._values = values
        _VALUES.setdefault(self.app_name, {}).update(values)

    @property
    def spark_session(self) -> "SparkSession":
        """The session of this process.

        Raises:
            errors.SettingsError: No usable Java was found.
        """
        return session.build_session(self.app_name, self._properties())

    @property
    def spark_context(self) -> Any:
        """The context of the session."""
        return self.spark_session.sparkContext

    def _properties(self) -> dict[str, str]:
        known = _VALUES.get(self.app_name, {}) | self._values
        return {
            key: known.get(key, value) if value == _HIDDEN else value
            for key, value in self.spark_config.items()
        }


def open_session(resource: SparkSource) -> "SparkSession":
    """Return the session of a resource.

    A session that a `LazyPySparkResource` would create begins with the settings of this package,
    and those of the resource override them. Another session of dagster-pyspark gets those that can
    change at run time, except those that its resource sets.

    Raises:
        errors.SettingsError: No usable Java was found.
    """
    if isinstance(resource, SparkResource):
        return resource.spark_session
    session.prepare_process()
    if isinstance(resource, LazyPySparkResource):
        config = dict(_flat(resource.spark_config))
        session.build_session(config.get("spark.app.name", "kcl-pipeline"), config)
    return session.adopt_session(resource.spark_session)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the properties of a resource of dagster-pyspark, which may be nested."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value).lower() if isinstance(value, bool) else str(value)


def check_spark(resource: object) -> None:
    """Check the argument `spark` of `definitions`.

    Raises:
        errors.SettingsError: It has no Spark session.
    """
    if not isinstance(resource, PySparkResource | LazyPySparkResource):
        raise wrong(
            "spark",
            resource,
            "has no Spark session",
            "Write SparkResource(...), PySparkResource(...) or LazyPySparkResource(...), or None",
        )
