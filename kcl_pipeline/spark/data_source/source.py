"""Define the Spark data source `kinesis`, for jobs that use Spark's offsets instead of leases.

    from kcl_pipeline import KinesisDataSource

    spark.dataSource.register(KinesisDataSource)
    spark.readStream.format("kinesis").option("streamName", "orders").load()

Options, guarantees and limits: `docs/data-source.md`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from pyspark import __version__
from pyspark.sql.datasource import DataSource
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from kcl_pipeline.batch import RECORD_SCHEMA
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.spark.data_source.batch import KinesisBatchReader
from kcl_pipeline.spark.data_source.options import Mode, SourceOptions, check_mode, parse_options
from kcl_pipeline.spark.schema import arrow_schema

if TYPE_CHECKING:
    from kcl_pipeline.spark.data_source.stream import KinesisStreamReader

FORMAT: Final = "kinesis"
_ADMISSION_CONTROL: Final = "pyspark.sql.streaming.datasource"
"""Before PySpark 4.2, a Python stream reader gets neither the start of a batch nor its limit."""


class KinesisDataSource(DataSource):
    """The format `kinesis`.

    Wrong options raise `SettingsError` with one sentence when the DataFrame is created.

    Example:
        >>> from kcl_pipeline import KinesisDataSource
        >>> spark.dataSource.register(KinesisDataSource)  # doctest: +SKIP
        >>> rows = spark.readStream.format("kinesis").option("stream", "orders")  # doctest: +SKIP
    """

    @classmethod
    def name(cls) -> str:
        """The name for `format`."""
        return FORMAT

    def schema(self) -> StructType:
        """The columns of `batch.RECORD_SCHEMA`."""
        parse_options(self.options)
        return from_arrow_schema(RECORD_SCHEMA)

    def reader(self, schema: StructType) -> KinesisBatchReader:
        """For `spark.read`."""
        return KinesisBatchReader(self._checked("batch", schema), arrow_schema(schema))

    def streamReader(self, schema: StructType) -> KinesisStreamReader:  # noqa: N802 (Spark's name)
        """For `spark.readStream`.

        Raises:
            SettingsError: PySpark is older than 4.2.
        """
        if find_spec(_ADMISSION_CONTROL) is None:
            raise SettingsError(
                f"spark.readStream.format('kinesis') needs PySpark 4.2, and this is {__version__}. "
                "Install pyspark>=4.2, or write spark.read.format('kinesis') or a KinesisPipeline."
            )
        # PySpark before 4.2 lacks a module that this one imports
        from kcl_pipeline.spark.data_source.stream import KinesisStreamReader  # noqa: PLC0415

        return KinesisStreamReader(self._checked("stream", schema), arrow_schema(schema))

    def _checked(self, mode: Mode, schema: StructType) -> SourceOptions:
        options = parse_options(self.options)
        check_mode(options, self.options, mode)
        expected = from_arrow_schema(RECORD_SCHEMA)
        if [(field.name, field.dataType) for field in schema] != [
            (field.name, field.dataType) for field in expected
        ]:
            raise SettingsError(
                f"the columns of format('kinesis') are {', '.join(expected.fieldNames())}; "
                "remove schema(…) and select the columns that you need"
            )
        return options
