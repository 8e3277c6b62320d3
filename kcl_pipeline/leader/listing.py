"""Derive missing leases and coverage from the list of shards, for the leader and its preview."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeGuard

from kcl_pipeline.config import ShardSyncSettings
from kcl_pipeline.errors import ShardSyncError
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leader.phase import keys_of
from kcl_pipeline.leader.report import StreamCoverage
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.stored_shards import StoredShards
from kcl_pipeline.planning.coverage import find_hole, hole_in_leases
from kcl_pipeline.planning.shard_sync import (
    initial_filter,
    leases_for_missing_shards,
    leases_for_new_stream,
    with_creation_time,
    with_initial_time,
)
from kcl_pipeline.planning.stored_shards import leases_with_stored
from kcl_pipeline.position import LATEST, TRIM_HORIZON
from kcl_pipeline.shards import Shard, StreamId


def initial_leases(
    kinesis: KinesisClient,
    settings: ShardSyncSettings,
    stream: StreamId,
    stored: StoredShards | None = None,
) -> tuple[Lease, ...]:
    """Return the leases to create for a stream that has none.

    Args:
        kinesis: Lists the shards.
        settings: The initial position.
        stream: The stream.
        stored: Asks the table for positions. None: it stores none.

    Raises:
        SinkError: The table cannot be read.
        ShardSyncError: The shards do not cover all hash keys, because of a reshard.
    """
    position = settings.initial_position_in_stream
    if position == "LATEST" and stream.recreated_millis is not None:
        # The application followed the former stream. All records of this one are new to it.
        position = "TRIM_HORIZON"
    shards = kinesis.list_shards(stream, initial_filter(position), settings.initial_timestamp)
    if find_hole(shard.hash_key_range for shard in shards) is not None:
        raise ShardSyncError(
            f"the {len(shards)} shards of {stream.name} at {position} do not cover all hash "
            "keys; the next cycle lists them again"
        )
    leases = leases_for_new_stream(stream, shards, position)
    if asks_table(stored, settings):
        listed = kinesis.list_shards(stream)
        leases = _with_stored(stream, leases, listed, (), stored, settings)
    return since_now(kinesis, stream, with_initial_time(leases, settings.initial_millis))


def since_now(
    kinesis: KinesisClient, stream: StreamId, leases: tuple[Lease, ...]
) -> tuple[Lease, ...]:
    """Return the leases that are about to be created, not at AT_TIMESTAMP with the present time.

    Raises:
        AwsError: The service does not respond.
    """
    if all(lease.checkpoint not in (LATEST, TRIM_HORIZON) for lease in leases):
        return leases
    return with_creation_time(leases, kinesis.service_time(stream))


def asks_table(stored: StoredShards | None, settings: ShardSyncSettings) -> TypeGuard[StoredShards]:
    """Return whether the positions in the table matter for the leases that are created.

    At TRIM_HORIZON every shard is reached from its oldest ancestor, and starts after its position.
    """
    return stored is not None and settings.initial_position_in_stream != "TRIM_HORIZON"


def _with_stored(
    stream: StreamId,
    initial_leases: Iterable[Lease],
    shards: Sequence[Shard],
    rows: Iterable[Lease],
    stored: StoredShards,
    settings: ShardSyncSettings,
) -> tuple[Lease, ...]:
    known = stored(stream, [shard.shard_id for shard in shards])
    by_shard = {row.shard_id: row for row in rows}
    initial = settings.initial_position_in_stream
    return leases_with_stored(stream, initial_leases, shards, by_shard, known, initial)


def has_unreadable_shards(
    kinesis: KinesisClient, stream: StreamId, unreadable: Iterable[str]
) -> bool:
    """Return whether an unreadable lease row belongs to a shard that the stream lists.

    Then a stream without other leases is not new, and the audit finds the missing leases.
    """
    keys = keys_of(unreadable, stream)
    return bool(keys) and not {
        stream.lease_key(shard.shard_id) for shard in kinesis.list_shards(stream)
    }.isdisjoint(keys)


def missing_leases(
    settings: ShardSyncSettings,
    rows: Iterable[Lease],
    unreadable: Iterable[str],
    shards: Sequence[Shard],
    stream: StreamId,
    stored: StoredShards | None = None,
) -> tuple[Lease, ...]:
    """Return the leases to add to a stream that has leases.

    An unreadable row counts as an existing, unfinished lease.

    Raises:
        ShardSyncError: The list is not consistent.
        SinkError: The table cannot be read.
    """
    rows = tuple(rows)
    existing = {row.shard_id: row.ended for row in rows} | {
        key.rsplit(":", 1)[-1]: False for key in unreadable
    }
    leases = leases_for_missing_shards(
        stream,
        shards,
        existing,
        settings.initial_position_in_stream,
        ignore_unexpected_child_shards=settings.ignore_unexpected_child_shards,
    )
    if asks_table(stored, settings):
        leases = _with_stored(stream, leases, shards, rows, stored, settings)
        leases = tuple(lease for lease in leases if lease.shard_id not in existing)
    return with_initial_time(leases, settings.initial_millis)


def needs_listing(lease: Lease) -> bool:
    """Return whether the row has no hash range, or no children although the shard is finished."""
    return not lease.child_shard_ids if lease.ended else lease.hash_key_range is None


def stream_coverage(stream: StreamId, rows: Iterable[Lease], audits: int) -> StreamCoverage:
    """Return the hash-range coverage of a stream for the report."""
    hole = hole_in_leases(rows)
    return StreamCoverage(
        stream.serialized,
        complete=hole is None,
        hole=None if hole is None else str(hole),
        confidence=0 if hole is None else audits,
    )
