"""Create the tables in DynamoDB again that were deleted while a worker runs.

The shards continue after the positions in the table of the sink. With a function as the sink they
begin at the initial position, as with KCL.
"""

from __future__ import annotations

from collections.abc import Callable

from kcl_pipeline.clock import StopSignal
from kcl_pipeline.errors import AwsError
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.worker.dependencies import WorkerDependencies
from kcl_pipeline.worker.recording import record_application
from kcl_pipeline.worker.retry import StoppedWhileRetryingError
from kcl_pipeline.worker.starting import OpenedApplication


class DeletedTables:
    """Notes that a table is missing, and creates it. Any thread may call `note`, one `restore`.

    Args:
        dependencies: The dependencies of the worker.
        application: Returns the application that the worker has opened.
        stop: Ends the worker.
    """

    def __init__(
        self,
        dependencies: WorkerDependencies,
        application: Callable[[], OpenedApplication],
        stop: StopSignal,
    ) -> None:
        self._dependencies = dependencies
        self._application = application
        self._stop = stop
        self._is_missed = False

    def note(self) -> None:
        """Note that a call did not find its table."""
        self._is_missed = True

    def restore(self, start_version: Callable[[], None]) -> None:
        """Create the missing tables, and record the application again.

        A failure is reported as `AwsTrouble`, and the next call tries again.

        Args:
            start_version: Writes the client version, which is recorded before the application.

        Raises:
            OtherApplicationError: Another application has the tables now.
            ApplicationPausedError: The application is paused.
        """
        if not self._is_missed or self._stop.is_set():
            return
        dependencies, self._is_missed = self._dependencies, False
        try:
            for table in (
                dependencies.lease_table,
                dependencies.worker_table,
                dependencies.coordinator_table,
            ):
                if table.ensure_exists():
                    self._tell(f"the table {table.name} did not exist any more; it exists again")
            start_version()
            record_application(self._application(), dependencies, self._stop)
        except AwsError as error:
            self._is_missed = True
            self._tell(str(error))
        except StoppedWhileRetryingError as error:
            self._tell(str(error))

    def _tell(self, text: str) -> None:
        self._dependencies.events(AwsTrouble("creation of deleted tables", text))
