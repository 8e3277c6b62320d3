"""Check the identity of the application before the shard of a gained lease is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kcl_pipeline.errors import AwsError, UnreadableRowError
from kcl_pipeline.events import AwsTrouble
from kcl_pipeline.worker.dependencies import WorkerDependencies

RETRY_SECONDS: Final = 0.5
_WHAT: Final = "look at the identity of the application"


class Admission:
    """Admit gained leases while the application is the one that this worker was started for.

    An operator may change the streams of an application while no worker holds a lease. A worker
    that was paused meanwhile, or had no lease, would read its old stream for a lease of the new
    one. So the identity record is read after each gain.

    Args:
        dependencies: The dependencies of the worker.
        check: Compares the record. It raises `OtherApplicationError` if the application differs.
    """

    def __init__(self, dependencies: WorkerDependencies, check: Callable[[], None]) -> None:
        self._dependencies = dependencies
        self._check = check
        self._due = 0.0

    def admits(self) -> bool:
        """Return whether leases that were gained before this call may be read.

        A record in an unknown format was not written by a change of streams. It admits leases.

        Returns:
            False: the record could not be read now. Call again.

        Raises:
            OtherApplicationError: The application has other streams or another sink now.
        """
        now = self._dependencies.clock.monotonic()
        if now < self._due:
            return False
        try:
            self._check()
        except UnreadableRowError as error:
            self._dependencies.events(AwsTrouble(_WHAT, str(error)))
        except AwsError as error:
            self._dependencies.events(AwsTrouble(_WHAT, str(error)))
            self._due = now + RETRY_SECONDS
            return False
        return True
