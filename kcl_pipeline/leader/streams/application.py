"""Check that the streams of the leader are those of the application."""

from __future__ import annotations

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import KclError, OtherApplicationError
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leader.streams.streams import Streams
from kcl_pipeline.leases.application.control import NOTHING_WANTED
from kcl_pipeline.leases.application.identity import ApplicationIdentity, with_recorded
from kcl_pipeline.leases.identity_check import ensure_application
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaseTable
from kcl_pipeline.shards import StreamId


class ApplicationGuard:
    """Records the identity of the application, and refuses to lead another one.

    A leader with other streams would create, complete and delete leases for the wrong shards.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        coordinator_table: CoordinatorStateTable,
        lease_table: LeaseTable,
        kinesis: KinesisClient,
        streams: Streams,
    ) -> None:
        self._settings = settings
        self._coordinator_table = coordinator_table
        self._lease_table = lease_table
        self._kinesis = kinesis
        self._streams = streams
        self.control = NOTHING_WANTED
        """The requests of an operator, as of the last check."""

    def check(self) -> None:
        """Compare the streams with the record, and add new ones if that is allowed.

        A stream that cannot be resolved now is ignored; the phases report it. If no stream can be
        resolved, only the names are compared.

        Raises:
            OtherApplicationError: The streams do not fit the record.
            AwsError: A call to a table failed.
        """
        self._streams.poll()
        try:
            self._ensure()
        except OtherApplicationError:
            # The streams were resolved when this process started. One of them may have been created
            # again, and the record changed by `--accept-streams`.
            self._streams.forget()
            self._ensure()

    def _ensure(self) -> None:
        found, unavailable = self._resolved()
        if not found:
            self._compare_names()
            return
        wanted = ApplicationIdentity.of(
            found,
            is_multi_stream=self._settings.is_multi_stream,
            shard_sync_of=self._settings.shard_sync_of,
            whole_aggregates=self._settings.retrieval.skip_kpl_deaggregation,
        )
        if unavailable or self._settings.selects_streams:
            record = self._coordinator_table.read_application()
            wanted = with_recorded(
                wanted, record, unavailable, keep_all=self._settings.selects_streams
            )
        recorded = ensure_application(
            self._settings.application_name,
            self._coordinator_table,
            self._lease_table,
            wanted,
            lambda: self._kinesis.list_shards(found[0]),
        )
        self.control = recorded.control
        self._streams.note_record(recorded.identity)

    def _compare_names(self) -> None:
        """Compare the names with the record, because no stream can be resolved now."""
        record = self._coordinator_table.read_application()
        if record is None:
            self.control = self._coordinator_table.read_control()
            return
        self.control = record.control
        self._streams.note_record(record.identity)
        recorded = {stream.name for stream in record.identity.streams}
        names = {name.rpartition("/")[2] for name in self._streams.configured()}
        if recorded and names and not recorded & names:
            raise OtherApplicationError(
                f"the application {self._settings.application_name!r} reads "
                f"{sorted(recorded)}, but streams={list(self._settings.streams)}; write these "
                "streams, or another application_name"
            )

    def _resolved(self) -> tuple[list[StreamId], list[str]]:
        """Return the configured streams, and the names of those that cannot be described."""
        found, unavailable = [], []
        for name in self._streams.configured():
            try:
                stream = self._streams.last_seen(name)
            except KclError:  # the phases resolve the same stream and report the error
                stream = None
            if stream is None:
                unavailable.append(name)
            else:
                found.append(stream)
        return found, unavailable
