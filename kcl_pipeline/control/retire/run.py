"""End an application: refuse while it lives, pause it, and delete its resources.

1. The rows are observed. If a worker or a leader is alive, nothing is changed.
2. The application is paused, so no worker starts. Then the rows are read once more.
3. The announcements, the fan-out consumers and all tables but one are deleted. A resource that
   fails does not stop the others.
4. The table with the pause and the record of the streams is deleted after everything else: the
   coordinator-state table, or the single table. While a resource has failed, it stays, and another
   call completes the work.

Each deletion names what was found, by its id, and is repeated until the resource is gone. So a lost
answer does no harm, and a resource that another process makes anew is not deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.control.retire.alive import POLL_SECONDS, ProcessObserver, candidates, changes
from kcl_pipeline.control.retire.resources import Resource, ResourceFinder, Resources
from kcl_pipeline.errors import (
    ApplicationInUseError,
    KclError,
    NotFoundError,
    SettingsError,
    SinkError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.leases.application.control import Control, Pause, words
from kcl_pipeline.leases.deletion import Presence
from kcl_pipeline.text import printable

PART_SECONDS: Final = 120.0
"""Longest time for the deletion of one resource."""
SINK_ATTEMPTS: Final = 3
CALL_ATTEMPTS: Final = 5
REASON: Final = "it is being retired"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RetirePlan:
    """What a retirement would delete.

    Attributes:
        resources: The resources and what stays.
        named: Processes that the rows name, alive or not.
        observed_seconds: How long their rows are observed before anything is deleted.
    """

    resources: Resources
    named: tuple[str, ...]
    observed_seconds: float


@dataclass(frozen=True, slots=True)
class ResourceResult:
    """The result of one resource. `reason` is empty for `deleted`."""

    resource: Resource
    outcome: Literal["deleted", "failed", "kept"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Retired:
    """The result of a retirement.

    Attributes:
        resources: What was found.
        results: The results, in the order of the deletion.
        is_paused: Whether the application is still paused.
    """

    resources: Resources
    results: tuple[ResourceResult, ...]
    is_paused: bool

    @property
    def is_complete(self) -> bool:
        """Whether everything is deleted."""
        return not self.resources.problems and all(one.outcome == "deleted" for one in self.results)


class Retiring:
    """Ends one application.

    Args:
        app: The application.
        finder: Finds its resources.
        on_wait: Called once with the seconds of the observation.
    """

    def __init__(
        self,
        app: ApplicationControl,
        finder: ResourceFinder,
        on_wait: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._app = app
        self._finder = finder
        self._on_wait = on_wait
        self._liveness = ProcessObserver(app)

    def plan(self) -> RetirePlan:
        """Find what would be deleted. Writes nothing.

        Raises:
            IncompatibleTableError: The application has rows of both layouts.
        """
        self._refuse_other_layout()
        seen = self._liveness.look()
        return RetirePlan(self._finder.find(), candidates(seen), self._liveness.seconds(seen))

    def retire(self, confirm: str) -> Retired:
        """Delete the resources.

        Args:
            confirm: The name of the application, which the operator has typed.

        Raises:
            SettingsError: `confirm` is another name, or the deletion protection of a table is on.
                Nothing is deleted.
            ApplicationInUseError: A worker or a leader is alive. Nothing is deleted.
        """
        if confirm != self._app.name:
            raise SettingsError(
                f"the confirmation {printable(confirm)!r} is not the name of the application "
                f"{self._app.name!r}; nothing is deleted"
            )
        self._refuse_other_layout()
        _require_unprotected(self._finder.find())
        last, living = self._liveness.living(self._on_wait)
        self._require_dead(living)
        control, is_new = self._pause()
        results: tuple[ResourceResult, ...] = ()
        try:
            self._require_dead(changes(last, self._liveness.look()))
            resources = self._finder.find()
            _require_unprotected(resources)
            results = self._delete_all(resources)
        finally:
            is_changed = any(one.outcome == "deleted" for one in results)
            if is_new and not is_changed and control is not None:
                self._end_pause(control)
        has_ended = any(
            one.resource is resources.last and one.outcome == "deleted" for one in results
        )
        is_paused = control is not None and not has_ended and (is_changed or not is_new)
        return Retired(resources, results, is_paused)

    def _refuse_other_layout(self) -> None:
        try:
            self._app.leases.refuse_other_layout()
        except NotFoundError:
            return

    def _require_dead(self, living: tuple[str, ...]) -> None:
        if living:
            raise ApplicationInUseError(
                f"the application {self._app.name!r} is alive: {'; '.join(living)}. Nothing is "
                "deleted. Switch the leader sensor off, stop the workers "
                "(`kcl-pipeline do pause`), and run the command again"
            )

    def _pause(self) -> tuple[Control | None, bool]:
        """Pause the application, so that no worker starts.

        Returns:
            The stored pause, and whether this call stored it. None: there is no row for a pause.
        """
        table = self._app.coordinator
        try:
            found = self._call(table.read_control)
            if found.pause is not None:
                return found, False
            pause = Pause(words(self._app.by), int(self._app.clock.wall() * 1000), REASON)
            if self._call(lambda: table.put_pause(pause, replacing=found)):
                return Control(pause, pause_value=pause.value), True
            if self._call(table.read_migration) is None:  # no worker has completed its start
                return None, False
        except NotFoundError:
            return None, False
        raise ApplicationInUseError(
            f"another process changed the pause of the application {self._app.name!r} at this "
            "moment; nothing is deleted; try again"
        )

    def _end_pause(self, control: Control) -> None:
        try:
            self._call(lambda: self._app.coordinator.put_pause(None, replacing=control))
        except NotFoundError:
            return

    def _delete_all(self, resources: Resources) -> tuple[ResourceResult, ...]:
        results = [self._delete(resource) for resource in resources.first]
        if resources.last is None:
            return tuple(results)
        if resources.problems or any(one.outcome == "failed" for one in results):
            reason = "it has the pause and the record, and other parts are not deleted yet"
            return (*results, ResourceResult(resources.last, "kept", reason))
        return (*results, self._delete(resources.last))

    def _delete(self, resource: Resource) -> ResourceResult:
        """Repeat the deletion of a resource until the resource is gone."""
        clock = self._app.clock
        deadline = clock.monotonic() + PART_SECONDS
        reason, sink_errors = "", 0
        while True:
            try:
                presence = resource.presence()
                if presence is Presence.GONE:
                    return ResourceResult(resource, "deleted")
                if presence is Presence.THERE:
                    resource.delete()
            except (ThrottledError, UnavailableError) as error:  # it may have been applied
                reason = str(error)
            except SinkError as error:  # the store does not say which errors are transient
                reason, sink_errors = str(error), sink_errors + 1
            except KclError as error:
                return ResourceResult(resource, "failed", str(error))
            if clock.monotonic() >= deadline or sink_errors >= SINK_ATTEMPTS:
                text = reason or f"it is not gone after {PART_SECONDS:.0f} s"
                return ResourceResult(resource, "failed", text)
            clock.sleep(POLL_SECONDS)

    def _call(self, step: Callable[[], _T]) -> _T:
        """Repeat a call whose answer was lost, with the same arguments."""
        for _ in range(CALL_ATTEMPTS - 1):
            try:
                return step()
            except (ThrottledError, UnavailableError):
                self._app.clock.sleep(POLL_SECONDS)
        return step()


def _require_unprotected(resources: Resources) -> None:
    """Look before the first deletion: half of an application is worse than all of it."""
    every = (*resources.first, *(() if resources.last is None else (resources.last,)))
    names = [resource.name for resource in every if resource.is_protected]
    if names:
        tables = ", ".join(printable(name) for name in names)
        raise SettingsError(
            f"the deletion protection is on for the tables {tables}; nothing is deleted. Switch it "
            "off (aws dynamodb update-table --no-deletion-protection-enabled --table-name NAME), "
            "and run the command again"
        )
