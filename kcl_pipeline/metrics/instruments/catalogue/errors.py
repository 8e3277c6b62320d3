"""The metrics of lost records, and of calls and rows that fail."""

from typing import Final

from kcl_pipeline import events as ev
from kcl_pipeline.metrics.instruments.instrument import (
    CALL,
    REASON,
    SUMMARY,
    counter,
)

INSTRUMENTS: Final = (
    counter(
        "RecordsLost",
        "LeaseCleanup",
        SUMMARY,
        "ranges of records that never reach the table",
        ev.RecordsLost,
        dimensions=(REASON,),
        in_kcl=False,
    ),
    counter(
        "AwsTrouble",
        "AwsCalls",
        SUMMARY,
        "calls that failed and are retried",
        ev.AwsTrouble,
        dimensions=(CALL,),
        in_kcl=False,
    ),
    counter(
        "RowsRejected",
        "AwsCalls",
        SUMMARY,
        "rows of the tables that cannot be used",
        ev.RowRejected,
        in_kcl=False,
    ),
    counter(
        "AnnouncementsRejected",
        "SinkCommit",
        SUMMARY,
        "announcements that cannot be used",
        ev.AnnouncementRejected,
        in_kcl=False,
    ),
    counter(
        "TableRestored",
        "SinkCommit",
        SUMMARY,
        "RESTOREs of the table, after which rows are not read again",
        ev.TableRestored,
        in_kcl=False,
    ),
    counter(
        "ArrowMemorySkipped",
        "ProcessBatch",
        SUMMARY,
        "reasons not to pass batches or results of Spark as Arrow columns in memory",
        ev.ArrowMemorySkipped,
        in_kcl=False,
    ),
    counter(
        "CpuSourcesSkipped",
        "WorkerMetrics",
        SUMMARY,
        "CPU sources that cannot be read",
        ev.CpuSourceSkipped,
        in_kcl=False,
    ),
)
