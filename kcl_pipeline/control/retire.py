"""End an application: refuse while it lives, pause it, and delete its resources.

1. Everything that would be deleted is looked at. What cannot be looked at is an error, and nothing
   is deleted.
2. Two snapshots are compared. What changed in between belongs to a living process, and then
   nothing is done. Rows of stopped workers stay for a day, so the existence of a row proves
   nothing, and clocks of two hosts are not compared.
3. The application is paused, so no worker starts. Then a third snapshot is compared.
4. The announcements, the fan-out consumers and all tables but one are deleted. A resource that
   fails does not stop the others.
5. The table with the pause and the record of the streams is the last one: the coordinator-state
   table, or the single table. While a resource has failed, it stays, and another call completes
   the work.

A deletion names what was found, by its id, and is repeated until the resource is gone. So a lost
answer does no harm, and a resource that another process makes anew is not deleted.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, Literal, TypeVar, cast

from kcl_pipeline.aws import Removals
from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.delta.maintenance import AnnouncementRemoval
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.errors import (
    ApplicationInUseError,
    KclError,
    NotFoundError,
    SettingsError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.kinesis.fan_out.removal import ConsumerRemoval, RegisteredConsumer
from kcl_pipeline.leases.application import Control, Pause, words
from kcl_pipeline.leases.coordinator import LeaderLock, UnreadableLock
from kcl_pipeline.leases.deletion import Presence, TableDeletion, TableFound
from kcl_pipeline.status.snapshot import (
    JAVA_PERIOD_SECONDS,
    Snapshot,
    TablesLike,
    compared,
    read_snapshot,
)
from kcl_pipeline.text import counted, printable

FIRST_POLL_SECONDS: Final = 0.1
"""First wait for a deletion that was requested. It doubles, up to `POLL_SECONDS`."""
POLL_SECONDS: Final = 1.0
PART_SECONDS: Final = 120.0
"""Longest time for the deletion of one resource."""
CALL_ATTEMPTS: Final = 5
REPORTS: Final = 3.0
"""Reporting periods without a change after which a worker counts as stopped."""
SHORTEST_PERIOD_SECONDS: Final = 1.0
"""The time in a worker's row has whole seconds, so a row does not change more often."""
MOST_LOCK_SECONDS: Final = 150.0
_DELTA: Final = "delta:"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that is deleted.

    Attributes:
        kind: `rows` are those of the application in a shared table.
        name: Its name.
        detail: What is known about it.
        presence: Whether it still exists.
        delete: Requests the deletion once.
        is_last: Whether it has the pause and the record, so that it is deleted last.
        is_protected: Whether DynamoDB refuses the deletion, because deletion protection is on.
    """

    kind: Literal["table", "rows", "announcements", "consumer"]
    name: str
    detail: str
    presence: Callable[[], Presence]
    delete: Callable[[], None]
    is_last: bool = False
    is_protected: bool = False

    def __str__(self) -> str:
        what = {
            "table": "the table",
            "rows": "the rows of the application in the table",
            "announcements": "the announcements of the table",
            "consumer": "the fan-out consumer",
        }[self.kind]
        return f"{what} {self.name} ({self.detail})"


@dataclass(frozen=True, slots=True)
class RetirePlan:
    """What a retirement deletes.

    Attributes:
        resources: In the order of their deletion.
        stays: Sentences about what is not deleted.
        named: Processes that the rows name, alive or not.
        observed_seconds: How long their rows are observed before anything is deleted.
    """

    resources: tuple[Resource, ...]
    stays: tuple[str, ...]
    named: tuple[str, ...] = ()
    observed_seconds: float = 0.0


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
        plan: What was found.
        results: The results, in the order of the deletion.
        is_paused: Whether the application is still paused.
    """

    plan: RetirePlan
    results: tuple[ResourceResult, ...]
    is_paused: bool

    @property
    def is_complete(self) -> bool:
        """Whether everything is deleted."""
        return all(each.outcome == "deleted" for each in self.results)


class Retiring:
    """Ends one application.

    Args:
        app: The application.
        removals: What deletes its resources in AWS.
        sink: The sink of its pipeline. None: unknown; the recorded one is used.
        streams: Names or ARNs of its streams, in addition to the recorded ones.
        on_wait: Called once with the seconds of the observation.
    """

    def __init__(
        self,
        app: ApplicationControl,
        removals: Removals,
        sink: object = None,
        streams: tuple[str, ...] = (),
        on_wait: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._app = app
        self._removals = removals
        self._sink = sink
        self._streams = streams
        self._on_wait = on_wait

    def plan(self) -> RetirePlan:
        """Find what would be deleted. Writes nothing.

        Raises:
            IncompatibleTableError: The application has rows of both layouts, or a table of its
                name belongs to another program.
            KclError: Something cannot be looked at.
        """
        with suppress(NotFoundError):
            self._app.leases.refuse_other_layout()
        snapshot = self._read()
        stays: list[str] = []
        record = _unless_missing(self._app.coordinator.read_application)
        arns = [] if record is None else [stream.arn for stream in record.identity.streams]
        tables, created = self._tables(stays)
        announcements = self._announcements(None if record is None else record.identity.sink, stays)
        consumers = self._consumers(arns, created, stays)
        shown = {*arns, *(arn.rpartition("/")[2] for arn in arns)}
        names = dict.fromkeys([*arns, *(name for name in self._streams if name not in shown)])
        stays += [f"the stream {printable(name)} and its records" for name in names]
        resources = (*announcements, *consumers, *tables)
        named = dict.fromkeys(
            [
                *(f"worker {printable(row.worker_id)}" for row in snapshot.workers),
                *(f"worker {printable(lease.owner)}" for lease in snapshot.leases if lease.owner),
                *([_leader(snapshot)] if _is_led(snapshot) else []),
            ]
        )
        return RetirePlan(resources, tuple(stays), tuple(named), self._observed_seconds(snapshot))

    def retire(self, confirm: str) -> Retired:
        """Delete the resources.

        Args:
            confirm: The name of the application, which the operator has typed.

        Raises:
            SettingsError: `confirm` is another name, or the deletion protection of a table is on.
                Nothing is deleted.
            ApplicationInUseError: A worker or a leader is alive. Nothing is deleted.
            KclError: As `plan`. Nothing is deleted.
        """
        if confirm != self._app.name:
            raise SettingsError(
                f"the confirmation {printable(confirm)!r} is not the name of the application "
                f"{self._app.name!r}; nothing is deleted"
            )
        plan = self.plan()
        # Half of an application is worse than all of it.
        if protected := [one.name for one in plan.resources if one.is_protected]:
            raise SettingsError(
                f"the deletion protection is on for the tables {', '.join(protected)}; nothing is "
                "deleted. Switch it off (aws dynamodb update-table "
                "--no-deletion-protection-enabled --table-name NAME), and run the command again"
            )
        snapshot = self._read()
        seconds = self._observed_seconds(snapshot)
        if seconds:
            self._on_wait(seconds)
            self._app.clock.sleep(seconds)
            snapshot = self._require_dead(snapshot, seconds)
        control, is_new = self._pause()
        results: list[ResourceResult] = []
        try:
            self._require_dead(snapshot, seconds)
            plan = self.plan()
            for resource in plan.resources:
                results.append(self._delete(resource, results))
        finally:
            deleted = [each.resource for each in results if each.outcome == "deleted"]
            if is_new and not deleted and control is not None:
                with suppress(NotFoundError):
                    self._app.coordinator.put_pause(None, replacing=control)
        has_ended = any(resource.is_last for resource in deleted)
        is_paused = control is not None and not has_ended and (bool(deleted) or not is_new)
        return Retired(plan, tuple(results), is_paused)

    # -- who is alive

    def _read(self) -> Snapshot:
        """Read the rows. A missing table has none.

        Raises:
            AwsError: A part cannot be read.
        """
        app = self._app
        tables = SimpleNamespace(lease=app.leases, workers=app.workers, coordinator=app.coordinator)
        snapshot = read_snapshot(cast("TablesLike", tables), app.settings, app.clock)
        for failure in snapshot.failures:
            if not isinstance(failure.error, NotFoundError):
                raise failure.error
        return snapshot

    def _observed_seconds(self, snapshot: Snapshot) -> float:
        """For how many seconds no row changes if every process is dead. 0: there is no row."""
        workers, bad, lock = snapshot.workers, snapshot.bad_rows, snapshot.lock
        seconds = 0.0
        if workers or bad:
            # An unreadable row may be one of a worker of the Java KCL.
            is_java = bad or any(row.run_id is None for row in workers)
            period = JAVA_PERIOD_SECONDS if is_java else SHORTEST_PERIOD_SECONDS
            seconds = REPORTS * max(period, self._app.report_seconds)
        if isinstance(lock, UnreadableLock):
            seconds = MOST_LOCK_SECONDS
        elif isinstance(lock, LeaderLock) and not lock.is_released:
            seconds = max(seconds, min(lock.lease_duration_millis / 1000, MOST_LOCK_SECONDS))
        elif not seconds and not any(lease.owner for lease in snapshot.leases):
            return 0.0
        settings = self._app.settings
        grace = settings.lease.failover_time_millis + settings.lease_discovery_interval_millis
        return max(seconds, grace / 1000)

    def _require_dead(self, before: Snapshot, seconds: float) -> Snapshot:
        """Return the rows as they are now, so many seconds after the observation began.

        Raises:
            ApplicationInUseError: A process has written since.
        """
        after = compared(before, self._read(), seconds)
        waits = {} if after.observed is None else after.observed.waits
        signs = [f"the worker {printable(row.worker_id)} has reported" for row in after.live]
        signs += [
            f"the worker {printable(owner)} renews its leases"
            for lease in after.unfinished
            if (owner := lease.actual_owner or lease.owner) and lease.lease_key not in waits
        ]
        if _is_led(after) and after.lock != before.lock:
            signs.append(f"the {_leader(after)} has renewed its lock")
        if after.bad_rows != before.bad_rows:
            signs.append("a row that cannot be read has changed")
        if signs:
            raise ApplicationInUseError(
                f"the application {self._app.name!r} is alive: {'; '.join(dict.fromkeys(signs))}. "
                "Nothing is deleted. Switch the leader sensor off, stop the workers "
                "(`kcl-pipeline do pause`), and run the command again"
            )
        return after

    def _pause(self) -> tuple[Control | None, bool]:
        """Pause the application, so that no worker starts.

        Returns:
            The stored pause, and whether this call stored it. None: there is no row for a pause.
        """
        table = self._app.coordinator
        with suppress(NotFoundError):
            found = table.read_control()
            if found.pause is not None:
                return found, False
            millis = int(self._app.clock.wall() * 1000)
            pause = Pause(words(self._app.by), millis, "it is being retired")
            if self._call(lambda: table.put_pause(pause, replacing=found)):
                return Control(pause, pause_value=pause.value), True
            if table.read_migration() is not None:
                raise ApplicationInUseError(
                    f"another process changed the pause of the application {self._app.name!r} at "
                    "this moment; nothing is deleted; try again"
                )
        return None, False  # no worker has completed its start

    # -- what is deleted

    def _delete(self, resource: Resource, before: list[ResourceResult]) -> ResourceResult:
        """Repeat the deletion of a resource until the resource is gone."""
        if resource.is_last and any(each.outcome == "failed" for each in before):
            reason = "it has the pause and the record, and other parts are not deleted yet"
            return ResourceResult(resource, "kept", reason)
        clock, wait = self._app.clock, FIRST_POLL_SECONDS
        deadline = clock.monotonic() + PART_SECONDS
        reason = f"it is not gone after {PART_SECONDS:.0f} s"
        while True:
            try:
                presence = resource.presence()
                if presence is Presence.GONE:
                    return ResourceResult(resource, "deleted")
                if presence is Presence.THERE:
                    resource.delete()
            except (ThrottledError, UnavailableError) as error:  # it may have been applied
                reason = str(error)
            except KclError as error:
                return ResourceResult(resource, "failed", str(error))
            if clock.monotonic() >= deadline:
                return ResourceResult(resource, "failed", reason)
            clock.sleep(wait)
            wait = min(2 * wait, POLL_SECONDS)

    def _call(self, step: Callable[[], _T]) -> _T:
        """Repeat a call whose answer was lost, with the same arguments."""
        for _ in range(CALL_ATTEMPTS - 1):
            with suppress(ThrottledError, UnavailableError):
                return step()
            self._app.clock.sleep(POLL_SECONDS)
        return step()

    def _tables(self, stays: list[str]) -> tuple[list[Resource], float | None]:
        """Return the tables, the last one at the end, and when the first one was created."""
        former, last = _unless_missing(self._removals.tables) or ((), None)
        resources: list[Resource] = []
        created: list[float] = []
        for table in former if last is None else (*former, last):
            found = _unless_missing(table.find)
            if found is None:
                continue
            created += [] if found.created_seconds is None else [found.created_seconds]
            if found.is_shared:
                rows = counted(found.foreign_rows, "row")
                stays.append(f"the table {found.name}, because it has {rows} of other programs")
            resources.append(_table(table, found, is_last=table is last))
        return resources, min(created, default=None)

    def _announcements(self, recorded: str | None, stays: list[str]) -> list[Resource]:
        """Return the announcements, and note the tables of the sink, which stay."""
        sink = self._sink
        if sink is None and recorded is not None and recorded.startswith(_DELTA):
            sink = DeltaSink(recorded.removeprefix(_DELTA))
        if not isinstance(sink, DeltaSink):
            stays.append("what the sink has written, and the dead letters")
            return []
        removal = AnnouncementRemoval(sink.uri, self._app.name, sink.storage_options)
        stays.append(f"the Delta table {removal.uri} with all its rows")
        stays.append(
            f"the positions of the shards of {self._app.name} in its log: a new application of "
            "this name continues after them. To read records again, use another name, or "
            "`kcl-pipeline do seek` after its start"
        )
        unless = " unless set" if self._sink is None else ""
        stays.append(f"the dead-letter table, if any ({sink.dead_letters}{unless})")
        found = removal.find()
        if found.unknown:
            text = counted(found.unknown, "announcement")
            stays.append(f"{text} that cannot be read; vacuum deletes them")
        if not found.names:
            return []
        detail = counted(len(found.names), "announced batch", "announced batches")

        def presence() -> Presence:
            is_there = set(found.names) & set(removal.find().names)
            return Presence.THERE if is_there else Presence.GONE

        def delete() -> None:
            removal.delete(found.names)

        return [Resource("announcements", removal.uri, detail, presence, delete)]

    def _consumers(
        self, recorded: list[str], created: float | None, stays: list[str]
    ) -> list[Resource]:
        """Return the fan-out consumers that the application has registered."""
        removal = self._removals.consumers
        names = dict.fromkeys([*recorded, *self._streams])
        arns = dict.fromkeys(n if n.startswith("arn:") else removal.arn_of(n) for n in names)
        resources = []
        for arn in filter(None, arns):
            given = self._app.settings.consumers_by_stream.get(arn)
            if given is not None:
                stays.append(f"the consumer {given}, which the settings name")
                continue
            found = removal.find(arn)
            since = None if found is None else found.created_seconds
            if found is not None and created and since is not None and since < int(created):
                # The application has found it, and has not registered it.
                why = "because it was registered before the application existed"
                stays.append(f"the consumer {found.arn}, {why}")
            elif found is not None:
                resources.append(_consumer(removal, found))
        return resources


def _is_led(snapshot: Snapshot) -> bool:
    return snapshot.lock is not None and not getattr(snapshot.lock, "is_released", False)


def _leader(snapshot: Snapshot) -> str:
    return f"leader {printable(getattr(snapshot.lock, 'owner_name', 'an unknown process'))}"


def _unless_missing(read: Callable[[], _T]) -> _T | None:
    """Return what is read. None: the table does not exist."""
    try:
        return read()
    except NotFoundError:
        return None


def _table(table: TableDeletion, target: TableFound, *, is_last: bool) -> Resource:
    is_protected = target.is_protected and not target.is_shared
    detail = counted(target.rows, "row")
    if target.is_shared:
        detail += f" of {target.rows + target.foreign_rows}; the table stays"
    elif is_protected:
        detail += "; its deletion protection is on"
    return Resource(
        "rows" if target.is_shared else "table",
        target.name,
        detail,
        lambda: table.presence(target),
        lambda: table.delete(target),
        is_last,
        is_protected,
    )


def _consumer(removal: ConsumerRemoval, consumer: RegisteredConsumer) -> Resource:
    def presence() -> Presence:
        found = removal.find(consumer.stream_arn)
        if found is None or found.arn != consumer.arn:
            return Presence.GONE
        return Presence.LEAVING if found.is_leaving else Presence.THERE

    def delete() -> None:
        removal.deregister(consumer)

    detail = f"registered as {consumer.name}"
    return Resource("consumer", consumer.arn, detail, presence, delete)


# -- what is said


def plan_sentences(plan: RetirePlan) -> list[str]:
    """What a retirement would delete, and what stays."""
    lines = [f"would delete {resource}" for resource in plan.resources]
    lines += [f"stays: {text}" for text in plan.stays]
    if plan.observed_seconds:
        lines.append(
            f"before that, the rows of {', '.join(plan.named)} must not change for "
            f"{plan.observed_seconds:.0f} s"
        )
    return lines or ["nothing is left of the application"]


def sentences(done: Retired) -> list[str]:
    """What a retirement has deleted."""
    lines = [] if done.results else ["nothing was left to delete"]
    for each in done.results:
        reason = f": {each.reason}" if each.reason else ""
        lines.append(f"{each.outcome} {each.resource}{reason}")
    lines += [f"stays: {text}" for text in done.plan.stays]
    if done.is_paused:
        lines.append("the application is still paused: retire it again to complete, or resume it")
    return lines


def plan_as_dict(plan: RetirePlan) -> dict[str, Any]:
    """The plan of a retirement for JSON output."""
    return {
        "parts": [
            {"kind": one.kind, "name": one.name, "detail": one.detail} for one in plan.resources
        ],
        "stays": list(plan.stays),
        "named": list(plan.named),
        "observed_seconds": plan.observed_seconds,
    }


def as_dict(done: Retired) -> dict[str, Any]:
    """The result of a retirement for JSON output."""
    found = plan_as_dict(done.plan)
    for part, each in zip(found["parts"], done.results, strict=True):
        part |= {"outcome": each.outcome, "reason": each.reason}
    return {**found, "is_paused": done.is_paused, "is_complete": done.is_complete}
