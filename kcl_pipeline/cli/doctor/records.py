"""Check what the tables record: streams and sink, the client version, and the layout."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from kcl_pipeline.cli.doctor.setup import ok, problem, warning
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import KclError, OtherApplicationError, UnreadableRowError
from kcl_pipeline.leader.kcl2 import READY_SECONDS
from kcl_pipeline.leases.application import ApplicationIdentity, successor
from kcl_pipeline.leases.coordinator import CoordinatorStateTable
from kcl_pipeline.leases.layout import (
    CONFIG_3X,
    VERSION_2X,
    VERSION_3X,
    VERSION_3X_WITH_ROLLBACK,
    VERSION_INIT,
    VERSION_UPGRADE_FROM_2X,
    Layout,
)
from kcl_pipeline.shards import StreamId
from kcl_pipeline.status.findings import Finding
from kcl_pipeline.status.snapshot import Snapshot


def check_application(
    table: CoordinatorStateTable, settings: ConsumerSettings, streams: Sequence[StreamId]
) -> Finding:
    """Check that the recorded streams are those of the settings."""
    subject = "application"
    try:
        record = table.read_application()
        if record is None:
            return ok(subject, "its streams are not recorded yet; the first start records them")
        if len(streams) == len(settings.streams):
            configured = ApplicationIdentity.of(streams, is_multi_stream=settings.is_multi_stream)
            successor(settings.application_name, record.identity, configured)
    except (OtherApplicationError, UnreadableRowError) as error:
        return problem(subject, str(error), "show the record with `kcl-pipeline do accept`")
    names = ", ".join(stream.name for stream in record.identity.streams)
    return ok(subject, f"reads {names}, writes to {record.identity.sink or 'no recorded sink'}")


TOOL: Final = "KclMigrationTool.py of the Java KCL"
_READY: Final = f"{READY_SECONDS / 60:.0f} minutes"


def check_client_version(table: CoordinatorStateTable, snapshot: Snapshot) -> Finding:
    """Check the client version in the row `Migration3.0`."""
    subject = "client version"
    try:
        found = table.read_migration()
    except UnreadableRowError as error:
        return problem(subject, str(error), "find out what wrote the row, and correct it")
    if found is None:
        return ok(subject, "not recorded yet; the first worker writes it")
    version = found.client_version
    text = f"{version}, set by {found.modified_by} at {_time(found.modified_millis)}"
    if version == VERSION_3X:
        return ok(subject, version)
    if version == VERSION_INIT:
        return warning(subject, text, "do nothing: the first worker that starts changes it")
    if version == VERSION_UPGRADE_FROM_2X:
        text += ": workers take leases from each other, as in KCL 2.x"
        return warning(subject, text, _upgrade(_silent(snapshot)))
    if version == VERSION_3X_WITH_ROLLBACK:
        return warning(
            subject,
            f"{text}: a leader assigns the leases, and a rollback to KCL 2.x is possible",
            f"when no rollback is needed any more, start the workers with "
            f"client_version_config={CONFIG_3X!r}: the first one sets {VERSION_3X}, which is "
            f"final; to go back, run {TOOL} with --mode rollback, and the workers follow within "
            "a minute",
        )
    if version == VERSION_2X:
        return warning(
            subject,
            f"{text}: rolled back; workers take leases from each other, and use neither index nor "
            "worker metrics",
            f"nothing comes next by itself; to go forward again, run {TOOL} with --mode "
            f"rollforward, which sets {VERSION_UPGRADE_FROM_2X}",
        )
    return problem(subject, f"{text}: it is not known", "update this package, or check the row")


def _upgrade(silent: list[str]) -> str:
    after = f"{VERSION_3X_WITH_ROLLBACK} comes next, when {_READY} have passed in which"
    every = "every lease has an owner and every owner reports metrics"
    if silent:
        return (
            f"replace the owners of leases that report no metrics: {', '.join(silent)}; "
            f"{after} {every}"
        )
    return f"do nothing: {after} {every}, as now"


def _silent(snapshot: Snapshot) -> list[str]:
    """The owners of leases that do not report."""
    live = {row.worker_id for row in snapshot.live}
    owners = {lease.owner for lease in snapshot.unfinished if lease.owner is not None}
    return sorted(owners - live)


def check_layout(layout: Layout, lease_table: str) -> Finding:
    """Check that the rows of the application are in one layout.

    Args:
        layout: The layout.
        lease_table: Name of the lease table.
    """
    subject = f"table {lease_table}"
    try:
        layout.refuse_two_layouts()
        is_single = layout.is_single()
        if is_single:
            layout.refuse_old_workers()
    except KclError as error:
        return problem(subject, str(error), "find out which programs use the application")
    if is_single:
        return ok(subject, "has all rows of the application: the single-table layout of KCL 3.5")
    if layout.status is None:
        return ok(subject, "has only leases: the three-table layout")
    return ok(
        subject,
        f"has only leases: the three-table layout. Java workers have set {layout.status}; no Java "
        "leader moves the application while a worker of this package runs",
    )


def _time(millis: int) -> str:
    try:
        at = datetime.fromtimestamp(millis / 1000, UTC)
    except (ValueError, OverflowError, OSError):  # somebody wrote it
        return "an unknown time"
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")
