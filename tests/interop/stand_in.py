"""A row of a worker of this package that reports and accepts no leases."""

from __future__ import annotations

import threading
from typing import Any

from botocore.exceptions import ClientError

from kcl_pipeline.clock import Clock

WORKER = "stand-in"
PERIOD_SECONDS = 2.0


class StandIn:
    """Reports in the worker-metrics table while cases stop and kill the workers of ours.

    A Java leader that is set to move an application begins as soon as no row of that table is
    younger than two of its reports (`TableMigrationStateMachineImpl.isLegacyWorkerMetricsEmpty`).
    The metric of this row is a failed one, so nobody gives the worker a lease.

    Args:
        dynamodb: Client of the embedded AWS.
        table: Name of the worker-metrics table.
        clock: The clock.
    """

    def __init__(self, dynamodb: Any, table: str, clock: Clock) -> None:
        self._dynamodb = dynamodb
        self._table = table
        self._clock = clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Report, and go on every two seconds."""
        if self._thread is None:
            self._stop.clear()
            self._report()
            self._thread = threading.Thread(target=self._run, name="stand-in", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End, and delete the row."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(30)
        self._thread = None
        self._dynamodb.delete_item(TableName=self._table, Key={"wid": {"S": WORKER}})

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_SECONDS):
            try:
                self._report()
            except ClientError as error:
                if error.response["Error"]["Code"] != "ResourceNotFoundException":
                    raise

    def _report(self) -> None:
        self._dynamodb.update_item(
            TableName=self._table,
            Key={"wid": {"S": WORKER}},
            UpdateExpression="SET lut = :now, sts = :failed, opr = :limit",
            ExpressionAttributeValues={
                ":now": {"N": str(int(self._clock.wall()))},
                ":failed": {"M": {"C": {"L": [{"N": "-1"}]}}},
                ":limit": {"M": {"C": {"L": [{"N": "100"}]}}},
            },
        )
