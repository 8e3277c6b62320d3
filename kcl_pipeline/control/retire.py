"""End an application: refuse while it lives, pause it, and delete its resources.

1. The rows are read twice. What changed in between belongs to a living process, and then nothing
   is done. Rows of stopped workers stay for a day, so the existence of a row proves nothing, and
   clocks of two hosts are not compared.
2. The application is paused, so no worker starts. Then the rows are read once more.
3. The announcements, the fan-out consumers and all tables but one are deleted. A resource that
   fails does not stop the others.
4. The table with the pause and the record of the streams is the last one: the coordinator-state
   table, or the single table. While a resource has failed, it stays, and another call completes
   the work.

A deletion names what was found, by its id, and is repeated until the resource is gone. So a lost
answer does no harm, and a resource that another process makes anew is not deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, TypeVar

from kcl_pipeline.aws import Removals
from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.delta.maintenance import AnnouncementRemoval, table_exists
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.errors import (
    ApplicationInUseError,
    KclError,
    NotFoundError,
    SettingsError,
    SinkError,
    ThrottledError,
    UnavailableError,
)
from kcl_pipeline.kinesis.fan_out.removal import ConsumerRemoval, RegisteredConsumer
from kcl_pipeline.leases.application.control import Control, Pause, words
from kcl_pipeline.leases.application.recorded_stream import RecordedStream
from kcl_pipeline.leases.deletion import Presence, TableDeletion, TableFound
from kcl_pipeline.leases.state.values import LeaderLock, UnreadableLock
from kcl_pipeline.text import counted, printable

POLL_SECONDS: Final = 1.0
PART_SECONDS: Final = 120.0
"""Longest time for the deletion of one resource."""
SINK_ATTEMPTS: Final = 3
CALL_ATTEMPTS: Final = 5
REPORTS: Final = 3.0
"""Reporting periods without a change after which a worker counts as stopped."""
JAVA_PERIOD_SECONDS: Final = 30.0
SHORTEST_PERIOD_SECONDS: Final = 1.0
"""The time in a worker's row has whole seconds, so a row does not change more often."""
MOST_LOCK_SECONDS: Final = 150.0
_DELTA: Final = "delta:"
_T = TypeVar("_T")

Rows = Mapping[tuple[str, str, str], Hashable]
"""By process, sign of life and row: what the process changes in the row while it lives."""


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
        problems: By name, why a resource cannot be looked at.
        stays: Sentences about what is not deleted.
        named: Processes that the rows name, alive or not.
        observed_seconds: How long their rows are observed before anything is deleted.
    """

    resources: tuple[Resource, ...]
    problems: Mapping[str, str]
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
        return not self.plan.problems and all(each.outcome == "deleted" for each in self.results)


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
            IncompatibleTableError: The application has rows of both layouts.
        """
        self._refuse_other_layout()
        rows, seconds = self._look()
        named = sorted({process for process, _, _ in rows}, key=_workers_first)
        return replace(self._find(), named=tuple(named), observed_seconds=seconds)

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
        _require_unprotected(self._find())
        rows, seconds = self._look()
        if seconds:
            self._on_wait(seconds)
            self._app.clock.sleep(seconds)
            rows = self._require_unchanged(rows)
        control, is_new = self._pause()
        results: tuple[ResourceResult, ...] = ()
        try:
            self._require_unchanged(rows)
            plan = self._find()
            _require_unprotected(plan)
            results = self._delete_all(plan)
        finally:
            deleted = [each.resource for each in results if each.outcome == "deleted"]
            if is_new and not deleted and control is not None:
                with suppress(NotFoundError):
                    self._call(partial(self._app.coordinator.put_pause, None, replacing=control))
        has_ended = any(resource.is_last for resource in deleted)
        is_paused = control is not None and not has_ended and (bool(deleted) or not is_new)
        return Retired(plan, results, is_paused)

    def _refuse_other_layout(self) -> None:
        with suppress(NotFoundError):
            self._app.leases.refuse_other_layout()

    # -- who is alive

    def _look(self) -> tuple[Rows, float]:
        """Read the rows. A missing table has none.

        Returns:
            The rows, and for how many seconds they do not change if every process is dead. 0: no
            row can belong to a living process.
        """
        app, settings = self._app, self._app.settings
        rows: dict[tuple[str, str, str], Hashable] = {}
        seconds = 0.0
        period = max(app.report_seconds, SHORTEST_PERIOD_SECONDS)
        with suppress(NotFoundError):
            workers = app.workers.scan_workers()
            for row in workers.workers:
                stats = tuple(sorted((name, tuple(cpu)) for name, cpu in row.stats.items()))
                key = (f"worker {printable(row.worker_id)}", "has reported", "")
                rows[key] = (row.last_update_seconds, stats, row.run_id)
            for bad in workers.bad_rows:
                rows[f"worker {printable(bad.key)}", "has reported", ""] = bad.heartbeat
            if workers.bad_rows or any(row.run_id is None for row in workers.workers):
                period = max(period, JAVA_PERIOD_SECONDS)  # it may be a worker of the Java KCL
            seconds = REPORTS * period if rows else 0.0
        with suppress(NotFoundError):
            for lease in app.leases.list_leases().leases:
                owner = lease.actual_owner or lease.owner
                if owner is not None:
                    key = (f"worker {printable(owner)}", "renews its leases", lease.lease_key)
                    rows[key] = lease.counter
        with suppress(NotFoundError):
            lock = app.coordinator.observe_lock()
            if isinstance(lock, LeaderLock) and not lock.is_released:
                name = f"leader {printable(lock.owner_name)}"
                rows[name, "has renewed its lock", ""] = lock.version
                seconds = max(seconds, min(lock.lease_duration_millis / 1000, MOST_LOCK_SECONDS))
            elif isinstance(lock, UnreadableLock):
                attributes = sorted((name, str(value)) for name, value in lock.attributes.items())
                rows["leader an unknown process", "has renewed its lock", ""] = tuple(attributes)
                seconds = MOST_LOCK_SECONDS
        lease_millis = settings.lease.failover_time_millis
        lease_millis += settings.lease_discovery_interval_millis
        return rows, max(seconds, lease_millis / 1000) if rows else 0.0

    def _require_unchanged(self, before: Rows) -> Rows:
        """Return the rows as they are now.

        Raises:
            ApplicationInUseError: A process has written since.
        """
        after, _ = self._look()
        changed = {key[:2] for key, value in after.items() if before.get(key) != value}
        if changed:
            signs = sorted(changed, key=lambda key: (_workers_first(key[0]), key[1]))
            living = "; ".join(f"the {process} {sign}" for process, sign in signs)
            raise ApplicationInUseError(
                f"the application {self._app.name!r} is alive: {living}. Nothing is deleted. "
                "Switch the leader sensor off, stop the workers (`kcl-pipeline do pause`), and run "
                "the command again"
            )
        return after

    def _pause(self) -> tuple[Control | None, bool]:
        """Pause the application, so that no worker starts.

        Returns:
            The stored pause, and whether this call stored it. None: there is no row for a pause.
        """
        table = self._app.coordinator
        with suppress(NotFoundError):
            found = self._call(table.read_control)
            if found.pause is not None:
                return found, False
            pause = Pause(
                words(self._app.by), int(self._app.clock.wall() * 1000), "it is being retired"
            )
            if self._call(lambda: table.put_pause(pause, replacing=found)):
                return Control(pause, pause_value=pause.value), True
            if self._call(table.read_migration) is not None:
                raise ApplicationInUseError(
                    f"another process changed the pause of the application {self._app.name!r} at "
                    "this moment; nothing is deleted; try again"
                )
        return None, False  # no worker has completed its start

    def _call(self, step: Callable[[], _T]) -> _T:
        """Repeat a call whose answer was lost, with the same arguments."""
        for _ in range(CALL_ATTEMPTS - 1):
            with suppress(ThrottledError, UnavailableError):
                return step()
            self._app.clock.sleep(POLL_SECONDS)
        return step()

    # -- what is deleted

    def _delete_all(self, plan: RetirePlan) -> tuple[ResourceResult, ...]:
        results: list[ResourceResult] = []
        for resource in plan.resources:
            if resource.is_last and (
                plan.problems or any(each.outcome == "failed" for each in results)
            ):
                reason = "it has the pause and the record, and other parts are not deleted yet"
                results.append(ResourceResult(resource, "kept", reason))
            else:
                results.append(self._delete(resource))
        return tuple(results)

    def _delete(self, resource: Resource) -> ResourceResult:
        """Repeat the deletion of a resource until the resource is gone."""
        clock = self._app.clock
        deadline = clock.monotonic() + PART_SECONDS
        reason, sink_errors = f"it is not gone after {PART_SECONDS:.0f} s", 0
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
                return ResourceResult(resource, "failed", reason)
            clock.sleep(POLL_SECONDS)

    def _find(self) -> RetirePlan:
        return _Search(self._app, self._removals, self._sink, self._streams).run()


class _Search:
    """One look at everything. A resource that cannot be looked at is a problem, not an error."""

    def __init__(
        self, app: ApplicationControl, removals: Removals, sink: object, streams: tuple[str, ...]
    ) -> None:
        self._app = app
        self._removals = removals
        self._sink = sink
        self._streams = streams
        self._problems: dict[str, str] = {}
        self._stays: list[str] = []

    def run(self) -> RetirePlan:
        """Find all resources."""
        table = self._app.coordinator
        about = f"record of the streams in the table {table.name}"
        record = self._attempt(about, table.read_application)
        recorded = () if record is None else record.identity.streams
        tables, created = self._tables()
        announcements = self._announcements(None if record is None else record.identity.sink)
        consumers = self._consumers(recorded, created)
        arns = [stream.arn for stream in recorded]
        shown = {*arns, *(arn.rpartition("/")[2] for arn in arns)}
        names = dict.fromkeys([*arns, *(name for name in self._streams if name not in shown)])
        self._stays += [f"the stream {printable(name)} and its records" for name in names]
        resources = (*announcements, *consumers, *tables)
        return RetirePlan(resources, self._problems, tuple(self._stays))

    def _attempt(self, name: str, step: Callable[[], _T | None]) -> _T | None:
        """Return the result of a step, or None after noting its error."""
        try:
            return step()
        except NotFoundError:
            return None
        except KclError as error:
            self._problems[name] = str(error)
            return None

    def _tables(self) -> tuple[list[Resource], float | None]:
        """Return the tables, the last one at the end, and when the first one was created."""
        former, last = self._attempt(
            f"tables of the application {self._app.name}", self._removals.tables
        ) or ((), None)
        resources: list[Resource] = []
        created: list[float] = []
        for table in former if last is None else (*former, last):
            found = self._attempt(f"table {table.name}", table.find)
            if found is None:
                continue
            if found.created_seconds is not None:
                created.append(found.created_seconds)
            if found.is_shared:
                rows = counted(found.foreign_rows, "row")
                why = f"because it has {rows} of other programs"
                self._stays.append(f"the table {found.name}, {why}")
            resources.append(_table(table, found, is_last=table is last))
        return resources, min(created, default=None)

    def _announcements(self, recorded: str | None) -> Iterator[Resource]:
        """Yield the announcements, and note the tables of the sink, which stay."""
        sink, stays = self._sink, self._stays
        if sink is None and recorded is not None and recorded.startswith(_DELTA):
            sink = DeltaSink(recorded.removeprefix(_DELTA))
        if not isinstance(sink, DeltaSink):
            stays.append("what the sink has written, and the dead letters")
            return
        removal = AnnouncementRemoval(sink.uri, self._app.name, sink.storage_options)
        if _may_exist(removal.uri, sink):
            stays.append(f"the Delta table {removal.uri} with all its rows")
            stays.append(
                f"the positions of the shards of {self._app.name} in its log: a new application of "
                "this name continues after them. To read records again, use another name, or "
                "`kcl-pipeline do seek` after its start"
            )
        if self._sink is None:
            unless = f"{sink.dead_letters} unless set"
            stays.append(f"the dead-letter table, if any ({unless})")
        elif _may_exist(sink.dead_letters, sink):
            stays.append(f"the dead-letter table {sink.dead_letters}")
        found = self._attempt(f"announcements of the table {removal.uri}", removal.find)
        if found is not None and found.unknown:
            text = counted(found.unknown, "announcement")
            stays.append(f"{text} that cannot be read; vacuum deletes them")
        if found is not None and found.names:
            names = found.names
            yield Resource(
                "announcements",
                removal.uri,
                counted(len(names), "announced batch", "announced batches"),
                lambda: Presence.THERE if set(names) & set(removal.find().names) else Presence.GONE,
                lambda: removal.delete(names),
            )

    def _consumers(
        self, recorded: tuple[RecordedStream, ...], created: float | None
    ) -> list[Resource]:
        """Return the fan-out consumers that the application has registered."""
        removal = self._removals.consumers
        arns: dict[str, None] = {}
        for name in (*(stream.arn for stream in recorded), *self._streams):
            arn = name if name.startswith("arn:") else None
            arn = arn or self._attempt(f"stream {printable(name)}", partial(removal.arn_of, name))
            arns |= {} if arn is None else {arn: None}
        resources = []
        for arn in arns:
            given = self._app.settings.consumers_by_stream.get(arn)
            if given is not None:
                self._stays.append(f"the consumer {given}, which the settings name")
                continue
            found = self._attempt(f"consumer {removal.name} of {arn}", partial(removal.find, arn))
            since = None if found is None else found.created_seconds
            if created is not None and since is not None and since < int(created):
                # The application has found it, and has not registered it.
                why = "because it was registered before the application existed"
                self._stays.append(f"the consumer {'' if found is None else found.arn}, {why}")
            elif found is not None:
                resources.append(_consumer(removal, found))
        return resources


def _workers_first(process: str) -> tuple[bool, str]:
    return process.startswith("leader "), process


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

    detail = f"registered as {consumer.name}"
    return Resource(
        "consumer", consumer.arn, detail, presence, lambda: removal.deregister(consumer)
    )


def _may_exist(uri: str, sink: DeltaSink) -> bool:
    """Return whether there is a Delta table, or it cannot be looked at."""
    try:
        return table_exists(uri, sink.storage_options)
    except SinkError:
        return True


def _require_unprotected(plan: RetirePlan) -> None:
    """Look before the first deletion: half of an application is worse than all of it."""
    names = [resource.name for resource in plan.resources if resource.is_protected]
    if names:
        tables = ", ".join(printable(name) for name in names)
        raise SettingsError(
            f"the deletion protection is on for the tables {tables}; nothing is deleted. Switch it "
            "off (aws dynamodb update-table --no-deletion-protection-enabled --table-name NAME), "
            "and run the command again"
        )


# -- what is said


def plan_sentences(plan: RetirePlan) -> list[str]:
    """What a retirement would delete, and what stays."""
    lines = [f"would delete {resource}" for resource in plan.resources]
    lines += [f"cannot look at {name}: {reason}" for name, reason in plan.problems.items()]
    lines += [f"stays: {text}" for text in plan.stays]
    if not lines:
        lines = ["nothing is left of the application"]
    if plan.observed_seconds:
        lines.append(
            f"before that, the rows of {', '.join(plan.named)} must not change for "
            f"{plan.observed_seconds:.0f} s"
        )
    return lines


def sentences(done: Retired) -> list[str]:
    """What a retirement has deleted."""
    lines = []
    for each in done.results:
        reason = f": {each.reason}" if each.reason else ""
        lines.append(f"{each.outcome} {each.resource}{reason}")
    lines += [f"failed {name}: {reason}" for name, reason in done.plan.problems.items()]
    lines += [f"stays: {text}" for text in done.plan.stays]
    if not done.results and not done.plan.problems:
        lines.insert(0, "nothing was left to delete")
    if done.is_paused:
        lines.append("the application is still paused: retire it again to complete, or resume it")
    return lines


def plan_as_dict(plan: RetirePlan) -> dict[str, Any]:
    """The plan of a retirement for JSON output."""
    return {
        "dry_run": True,
        **_as_dict(plan, [_fields(resource) for resource in plan.resources]),
        "named": list(plan.named),
        "observed_seconds": plan.observed_seconds,
    }


def as_dict(done: Retired) -> dict[str, Any]:
    """The result of a retirement for JSON output."""
    parts = [
        _fields(each.resource) | {"outcome": each.outcome, "reason": each.reason}
        for each in done.results
    ]
    return {
        "dry_run": False,
        **_as_dict(done.plan, parts),
        "is_paused": done.is_paused,
        "is_complete": done.is_complete,
    }


def _as_dict(plan: RetirePlan, resources: list[dict[str, Any]]) -> dict[str, Any]:
    problems = [{"name": name, "reason": reason} for name, reason in plan.problems.items()]
    return {"parts": resources, "problems": problems, "stays": list(plan.stays)}


def _fields(resource: Resource) -> dict[str, Any]:
    return {"kind": resource.kind, "name": resource.name, "detail": resource.detail}
