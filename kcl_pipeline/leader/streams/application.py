"""Record the streams of the application, and check that the leader reads the same."""

from __future__ import annotations

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import KclError, OtherApplicationError
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leader.streams.streams import Streams
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

    def check(self) -> None:
        """Describe the streams that are due, compare all with the record, and add new ones.

        A stream that cannot be described now is ignored; its error is reported later.

        Raises:
            OtherApplicationError: The streams do not fit the record.
            AwsError: A call to a table failed.
        """
        self._streams.poll()
        self._streams.refresh()
        try:
            self._ensure()
        except OtherApplicationError:
            # The streams were described a while ago. One of them may have been created again, and
            # the record changed by `--accept-streams`.
            self._streams.forget()
            self._ensure()

    def _ensure(self) -> None:
        described, unavailable = self._described()
        record = self._coordinator_table.read_application()
        if not described:
            if record is not None:
                self._streams.note_record(record.identity)
            return
        identity = ApplicationIdentity.of(
            described,
            is_multi_stream=self._settings.is_multi_stream,
            shard_sync_of=self._settings.shard_sync_of,
            whole_aggregates=self._settings.retrieval.skip_kpl_deaggregation,
        )
        if unavailable or self._settings.selects_streams:
            identity = with_recorded(
                identity, record, unavailable, keep_all=self._settings.selects_streams
            )
        recorded = ensure_application(
            self._settings.application_name,
            self._coordinator_table,
            self._lease_table,
            identity,
            lambda: self._kinesis.list_shards(described[0]),
        )
        self._streams.note_record(recorded.identity)

    def _described(self) -> tuple[list[StreamId], list[str]]:
        """Return the configured streams, and the names of those that cannot be described."""
        described, unavailable = [], []
        for name in self._streams.configured():
            try:
                described.append(self._streams.look(name))
            except KclError:  # `Streams.for_each` reports it
                unavailable.append(name)
        return described, unavailable
