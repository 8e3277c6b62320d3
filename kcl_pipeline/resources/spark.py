"""Configure the Spark session as a Dagster resource."""

from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkResource(dg.ConfigurableResource[Any]):
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

        return build_session(self.app_name, self.spark_config)
