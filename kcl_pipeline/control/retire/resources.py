"""Find the resources of an application that a retirement deletes, and what stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeVar

from kcl_pipeline.aws import Removals
from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.delta.announced import AnnouncementRemoval
from kcl_pipeline.delta.maintenance import table_exists
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.errors import KclError, NotFoundError, SinkError
from kcl_pipeline.kinesis.fan_out.removal import ConsumerRemoval, RegisteredConsumer
from kcl_pipeline.leases.application.identity import ApplicationRecord
from kcl_pipeline.leases.application.recorded_stream import RecordedStream
from kcl_pipeline.leases.deletion import Presence, TableDeletion, TableFound
from kcl_pipeline.text import counted, printable

_T = TypeVar("_T")
Kind = Literal["table", "rows", "announcements", "consumer"]
_DELTA: Final = "delta:"
_POSITIONS: Final = (
    "the positions of the shards of {name} in its log: a new application of this name continues "
    "after them. To read records again, use another name, or `kcl-pipeline do seek` after its start"
)


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that is deleted.

    Attributes:
        kind: `rows` are those of the application in a shared table.
        name: Its name.
        detail: What is known about it.
        presence: Whether it still exists.
        delete: Requests the deletion once.
        is_protected: Whether DynamoDB refuses the deletion, because deletion protection is on.
    """

    kind: Kind
    name: str
    detail: str
    presence: Callable[[], Presence]
    delete: Callable[[], None]
    is_protected: bool = False


@dataclass(frozen=True, slots=True)
class ResourceProblem:
    """A resource that cannot be looked at or deleted, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resources:
    """What a retirement deletes.

    Attributes:
        first: Those that are deleted first. Their order does not matter.
        last: The table that has the pause and the record of the streams.
        problems: Resources that cannot be looked at.
        stays: Sentences about what is not deleted.
    """

    first: tuple[Resource, ...]
    last: Resource | None
    problems: tuple[ResourceProblem, ...]
    stays: tuple[str, ...]

    @property
    def all(self) -> tuple[Resource, ...]:
        """All resources, in the order of their deletion."""
        return self.first if self.last is None else (*self.first, self.last)


class ResourceFinder:
    """Finds the resources of one application.

    Args:
        app: The application.
        removals: What deletes its resources in AWS.
        sink: The sink of its pipeline. None: unknown; the recorded one is used.
        streams: Names or ARNs of its streams, in addition to the recorded ones.
    """

    def __init__(
        self,
        app: ApplicationControl,
        removals: Removals,
        sink: object = None,
        streams: tuple[str, ...] = (),
    ) -> None:
        self._app = app
        self._removals = removals
        self._sink = sink
        self._streams = streams
        self._problems: list[ResourceProblem] = []
        self._stays: list[str] = []
        self._created: list[float] = []

    def find(self) -> Resources:
        """Look at everything. A resource that cannot be looked at is a problem, not an error."""
        self._problems, self._stays, self._created = [], [], []
        streams, recorded_sink = self._record()
        tables = self._attempt(f"tables of the application {self._app.name}", self._removals.tables)
        former, state = ((), None) if tables is None else tables
        before = [self._table(one) for one in former]
        last = None if state is None else self._table(state)
        announcements = self._announcements(recorded_sink)
        first = [announcements, *[self._consumer(arn) for arn in self._arns(streams)], *before]
        self._streams_stay(streams)
        return Resources(
            tuple(resource for resource in first if resource is not None),
            last,
            tuple(self._problems),
            tuple(self._stays),
        )

    def _record(self) -> tuple[tuple[RecordedStream, ...], str | None]:
        table = self._app.coordinator

        def read() -> ApplicationRecord | None:
            try:
                return table.read_application()
            except NotFoundError:
                return None

        record = self._attempt(f"record of the streams in the table {table.name}", read)
        if record is None:
            return (), None
        return record.identity.streams, record.identity.sink

    def _table(self, table: TableDeletion) -> Resource | None:
        found = self._attempt(f"table {table.name}", table.find)
        if found is None:
            return None
        if found.created_seconds is not None:
            self._created.append(found.created_seconds)
        if found.is_shared:
            self._stays.append(
                f"the table {found.name}, because it has "
                f"{counted(found.foreign_rows, 'row')} of other programs"
            )
        return Resource(
            "rows" if found.is_shared else "table",
            found.name,
            _about(found),
            lambda: table.presence(found),
            lambda: table.delete(found),
            is_protected=found.is_protected and not found.is_shared,
        )

    def _announcements(self, recorded_sink: str | None) -> Resource | None:
        sink = self._sink
        uri = options = letters = None
        if isinstance(sink, DeltaSink):
            uri, options, letters = sink.uri, sink.storage_options, sink.dead_letters
        elif sink is None and (recorded_sink or "").startswith(_DELTA):
            uri = (recorded_sink or "").removeprefix(_DELTA)
        if uri is None:
            self._stays.append("what the sink has written, and the dead letters")
            return None
        removal = AnnouncementRemoval(uri, self._app.name, options)
        if _may_exist(removal.uri, options):
            self._stays += [
                f"the Delta table {removal.uri} with all its rows",
                _POSITIONS.format(name=self._app.name),
            ]
        if letters is None:
            self._stays.append(f"the dead-letter table, if any ({uri}_dead_letters unless set)")
        elif _may_exist(letters, options):
            self._stays.append(f"the dead-letter table {letters}")
        found = self._attempt(f"announcements of the table {removal.uri}", removal.find)
        if found is None:
            return None
        if found.unknown:
            self._stays.append(
                f"{counted(found.unknown, 'announcement')} that cannot be read; vacuum deletes them"
            )
        return _announcements_resource(removal, found.names) if found.names else None

    def _arns(self, recorded: tuple[RecordedStream, ...]) -> list[str]:
        """Return the ARNs of the recorded streams and of those that the settings name."""
        found: dict[str, None] = {}
        for name in (*(one.arn for one in recorded), *self._streams):
            arn: str | None = name
            if not name.startswith("arn:"):
                find = partial(self._removals.consumers.arn_of, name)
                arn = self._attempt(f"stream {printable(name)}", find)
            found |= {} if arn is None else {arn: None}
        return list(found)

    def _consumer(self, stream_arn: str) -> Resource | None:
        removal = self._removals.consumers
        given = self._app.settings.consumers_by_stream.get(stream_arn)
        if given is not None:
            self._stays.append(f"the consumer {given}, which the settings name")
            return None
        about = f"consumer {removal.name} of {stream_arn}"
        found = self._attempt(about, lambda: removal.find(stream_arn))
        if found is not None and self._is_older(found):
            self._stays.append(
                f"the consumer {found.arn}, because it was registered before the application "
                "existed"
            )
            return None
        return None if found is None else _consumer_resource(removal, found)

    def _is_older(self, consumer: RegisteredConsumer) -> bool:
        """Return whether the consumer existed before the first table of the application.

        Then the application has found it, and has not registered it.
        """
        created = consumer.created_seconds
        return bool(self._created) and created is not None and created < int(min(self._created))

    def _streams_stay(self, recorded: tuple[RecordedStream, ...]) -> None:
        arns = [one.arn for one in recorded]
        shown = {*arns, *(arn.rpartition("/")[2] for arn in arns)}
        names = dict.fromkeys([*arns, *(one for one in self._streams if one not in shown)])
        self._stays += [f"the stream {printable(name)} and its records" for name in names]

    def _attempt(self, name: str, step: Callable[[], _T | None]) -> _T | None:
        """Return the result of a step, or None after noting its error."""
        try:
            return step()
        except KclError as error:
            self._problems.append(ResourceProblem(name, str(error)))
            return None


def _may_exist(uri: str, options: Mapping[str, str] | None) -> bool:
    """Return whether there is a Delta table, or it cannot be looked at."""
    try:
        return table_exists(uri, options)
    except SinkError:
        return True


def _about(table: TableFound) -> str:
    about = counted(table.rows, "row")
    if table.is_shared:
        about += f" of {table.rows + table.foreign_rows}; the table stays"
    return f"{about}; its deletion protection is on" if table.is_protected else about


def _announcements_resource(removal: AnnouncementRemoval, names: tuple[str, ...]) -> Resource:
    def presence() -> Presence:
        return Presence.THERE if set(names) & set(removal.find().names) else Presence.GONE

    return Resource(
        "announcements",
        removal.uri,
        counted(len(names), "announced batch", "announced batches"),
        presence,
        lambda: removal.delete(names),
    )


def _consumer_resource(removal: ConsumerRemoval, consumer: RegisteredConsumer) -> Resource:
    def presence() -> Presence:
        found = removal.find(consumer.stream_arn)
        if found is None or found.arn != consumer.arn:
            return Presence.GONE
        return Presence.LEAVING if found.is_leaving else Presence.THERE

    return Resource(
        "consumer",
        consumer.arn,
        f"registered as {consumer.name}",
        presence,
        lambda: removal.deregister(consumer),
    )
