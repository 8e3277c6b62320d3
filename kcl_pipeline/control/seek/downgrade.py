"""Give up the positions in the table: write them to the lease rows, then remove them.

Afterwards the rows alone say where the shards continue, as workers with the two-phase protocol, or
of a version without positions, expect. Nothing is repeated and nothing is skipped. It is a seek of
each shard to the position where it is; see `stored`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kcl_pipeline.batch import ShortNames, TxnVersions
from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.control.seek.log import BatchLog, position_store
from kcl_pipeline.control.seek.plan import PositionChange
from kcl_pipeline.control.seek.run import Seeking, SeekPlan, Sought
from kcl_pipeline.control.seek.stored import StoredPositions
from kcl_pipeline.control.seek.target import SeekTarget
from kcl_pipeline.errors import ApplicationInUseError, SettingsError
from kcl_pipeline.kinesis.client import StreamLister
from kcl_pipeline.leases.application.control import Control
from kcl_pipeline.leases.lease.seek import LeaseSeek
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.stored_shards import position_key
from kcl_pipeline.planning.shard_sync import new_lease
from kcl_pipeline.position import TRIM_HORIZON
from kcl_pipeline.shards import StreamId


class Downgrade(Seeking):
    """Moves the positions of one application from the table to the lease rows.

    Args:
        app: The application.
        kinesis: Lists the shards.
        sink: The sink of the application.

    Raises:
        SettingsError: The sink stores no positions.
    """

    def __init__(
        self, app: ApplicationControl, kinesis: StreamLister, sink: BatchLog | None
    ) -> None:
        store = position_store(sink)
        if sink is None or store is None:
            raise SettingsError("the sink of this pipeline stores no positions")
        super().__init__(app, kinesis, SeekTarget("TRIM_HORIZON", TRIM_HORIZON), sink=sink)
        self._stored = StoredPositions(sink, store)
        self._reason = "downgrade"
        self._log = sink

    def _write(self, plan: SeekPlan, token: str, control: Control, *, is_paused: bool) -> Sought:
        """Move the positions, then record that the rows have them, while nobody works.

        Versions that know only long names read the table afterwards, so the names become long.

        If some leases changed meanwhile, the record does not change; the next downgrade does it.

        Raises:
            ApplicationInUseError: Another process changed the record.
        """
        if isinstance(self._log, ShortNames):
            self._log.use_long_names()
        done = super()._write(plan, token, control, is_paused=is_paused)
        record = self._app.coordinator.read_application()
        if done.refused or record is None or not record.identity.positions:
            return done
        after = replace(record.identity, positions=False, short_names=False)
        if not self._app.coordinator.put_application(after, replacing=record):
            raise ApplicationInUseError(
                "another process changed the record of the application; run the command again"
            )
        return done

    def _of_stream(self, stream: StreamId, leases: Sequence[Lease]) -> list[PositionChange]:
        """Return a change for each shard of which the table stores a position.

        A listed shard whose row was deleted gets one, because nobody asks the table any more.
        """
        rows = {one.shard_id: one for one in leases}
        missing = [
            new_lease(stream, shard, TRIM_HORIZON)
            for shard in self._kinesis.list_shards(stream)
            if shard.shard_id not in rows
        ]
        wanted = [*(one for one in leases if not one.ended), *missing]
        keys = {one.lease_key: position_key(stream, one) for one in wanted}
        found = self._log.txn_versions([key for key in keys.values() if key is not None])
        return [
            change
            for one in wanted
            if (key := keys[one.lease_key]) is not None
            and (change := _change(one, found[key], exists=one.shard_id in rows)) is not None
        ]


def _change(lease: Lease, versions: TxnVersions, *, exists: bool) -> PositionChange | None:
    """Return the change of one shard; None if the table stores no position of it.

    Raises:
        SettingsError: The lease has a prepared batch.
    """
    if versions.position is None and not versions.ended:
        return None
    if not exists and versions.ended:
        return None
    if lease.pending_checkpoint is not None:
        raise SettingsError(
            f"{lease.lease_key} has a prepared batch; start workers with "
            "commit_protocol='positions' once more, and stop them when they have settled it"
        )
    position = max(lease.checkpoint, versions.position or lease.checkpoint)
    seek = LeaseSeek(lease, position, lease.initial_millis, exists=exists)
    return PositionChange(seek, "continues where it is", leaves_table=True)
