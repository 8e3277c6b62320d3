"""Record the identity of an application at its first start, and refuse a start that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from kcl_pipeline.errors import OtherApplicationError
from kcl_pipeline.leases.application import (
    ACCEPT_STREAMS,
    ApplicationIdentity,
    ApplicationRecord,
    application_text,
    contradiction,
    successor,
)
from kcl_pipeline.leases.coordinator import CoordinatorStateTable
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.shards import Shard, StreamId

ATTEMPTS: Final = 5


def check_application(
    name: str, coordinator_table: CoordinatorStateTable, configured: ApplicationIdentity
) -> ApplicationRecord:
    """Refuse a start that does not fit the recorded identity. Writes nothing.

    Returns:
        The record; one with `configured`, and the requests of an operator, if there is none.

    Raises:
        OtherApplicationError: The start does not fit.
    """
    record = coordinator_table.read_application()
    if record is None:
        return ApplicationRecord(configured, "", coordinator_table.read_control())
    successor(name, record.identity, configured)
    return record


def ensure_application(
    name: str,
    coordinator_table: CoordinatorStateTable,
    lease_table: LeaseTable,
    configured: ApplicationIdentity,
    list_shards: Callable[[], Iterable[Shard]],
) -> ApplicationRecord:
    """Record the identity, or the streams that a start adds, and return the record.

    The client-version row must exist. If another process writes first, the record is read again.

    Args:
        name: Name of the application.
        coordinator_table: The coordinator-state table.
        lease_table: The lease table.
        configured: The identity of the start.
        list_shards: Lists all shards of a single stream. Called only if there are leases but no
            record.

    Raises:
        OtherApplicationError: The start does not fit.
    """
    for _ in range(ATTEMPTS):
        record = coordinator_table.read_application()
        if record is None:
            following = check_leases(name, coordinator_table, lease_table, configured, list_shards)
        else:
            following = successor(name, record.identity, configured)
            if following == record.identity:
                return record
        if coordinator_table.put_application(following, replacing=record):
            # An operator may have removed an unreadable record of a paused application
            control = coordinator_table.read_control() if record is None else record.control
            return ApplicationRecord(following, application_text(following), control)
    raise OtherApplicationError(
        f"the identity of the application {name!r} in the table {coordinator_table.name} changed "
        f"{ATTEMPTS} times while this process was starting"
    )


def is_removed(coordinator_table: CoordinatorStateTable, stream: StreamId) -> bool:
    """Return whether a leader removed a stream of several from the record.

    Raises:
        AwsError: The record cannot be read.
    """
    if stream.creation_epoch is None:
        return False
    record = coordinator_table.read_application()
    return record is not None and all(
        one.account_and_name != (stream.account, stream.name) for one in record.identity.streams
    )


def check_leases(
    name: str,
    coordinator_table: CoordinatorStateTable,
    lease_table: LeaseTable,
    configured: ApplicationIdentity,
    list_shards: Callable[[], Iterable[Shard]],
) -> ApplicationIdentity:
    """Compare existing leases with a start without a record, and return the identity to record.

    If the leases do not fit, but another process has recorded the application meanwhile, its record
    decides, and `configured` is returned. Writes nothing.

    Raises:
        OtherApplicationError: The leases are those of other streams, and there is no record.
    """
    leases = lease_table.list_leases().leases
    if not leases:
        return configured
    reason = contradiction(
        leases, configured, list_shards() if configured.mode == "single_stream" else ()
    )
    if reason is not None and coordinator_table.read_application() is not None:
        return configured
    if reason is not None:
        raise OtherApplicationError(
            f"the leases in the table {lease_table.name} are not those of the application {name!r} "
            f"as it is set now: {reason}; write the streams that it reads, or another name, or "
            f"stop its workers and run {ACCEPT_STREAMS}"
        )
    inside = [lease.lease_key for lease in leases if lease.checkpoint.sub_sequence_number]
    if configured.whole_aggregates and inside:
        raise OtherApplicationError(
            f"retrieval.skip_kpl_deaggregation=True, but the checkpoint of {inside[0]} in the "
            f"table {lease_table.name} is inside of a KPL aggregate; write "
            "skip_kpl_deaggregation=False, or another application name"
        )
    recreated = {lease.recreated_millis for lease in leases} - {None}
    streams = tuple(
        replace(stream, renewed=stream.created_millis in recreated) for stream in configured.streams
    )
    return replace(configured, streams=streams)


def as_json(record: ApplicationRecord | None) -> Mapping[str, object] | None:
    """Return the record for the output of `--json`."""
    if record is None:
        return None
    identity = record.identity
    return {
        "mode": identity.mode,
        "streams": [
            {"arn": stream.arn, "created_millis": stream.created_millis}
            for stream in identity.streams
        ],
        "sink": identity.sink,
        "changing": identity.changing,
    }
