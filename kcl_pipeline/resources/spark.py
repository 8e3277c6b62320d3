"""The Spark session as a Dagster resource."""

from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkResource(dg.ConfigurableResource[Any]):
    """A session that is made when first asked for, five seconds that runs without Spark do not pay,
    and shared by the process.
    """

    app_name: str = Field(description="The name that Spark shows")
    spark_config: dict[str, str] = Field(
        default_factory=dict, description="Spark properties; they win over the package's own"
    )

    def session(self) -> "SparkSession":
        """The session of this process.

        Raises `errors.SettingsError` when there is no usable Java.
        """
        # pyspark is loaded only where it is used
        from kcl_pipeline.spark.session import build_session  # noqa: PLC0415

        return build_session(self.app_name, self.spark_config)
