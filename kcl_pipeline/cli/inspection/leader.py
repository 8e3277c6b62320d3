"""`kcl-pipeline leader`: show the leader's lock and whether the leader is alive."""

from typing import Annotated, Final

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.exit_codes import FAILED
from kcl_pipeline.cli.target import Application, AsJson, Pipeline, Streams, target
from kcl_pipeline.clock import Clock
from kcl_pipeline.config import MAX_LOCK_DURATION_MILLIS
from kcl_pipeline.errors import UnreadableRowError
from kcl_pipeline.leases.tables import CoordinatorStateTable, LeaderLock, UnreadableLock

POLL_SECONDS: Final = 0.5


def leader(
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait for a renewal, at most the duration of the lock. The exit code is 1 "
            "without a renewal.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the leader's lock.

    The lock has no time stamp. Only its next change shows that the leader is alive: use --wait.
    """
    app = target(application, stream, pipeline)
    table = app.tables.coordinator
    lock = table.observe_lock()
    if isinstance(lock, UnreadableLock):
        raise UnreadableRowError(
            f"{lock.reason}; a leader takes the lock when the row has not changed for "
            f"{MAX_LOCK_DURATION_MILLIS // 1000} s"
        )
    migration = table.read_migration()
    alive = wait_for_renewal(table, lock, app.clock) if wait and lock is not None else None
    if as_json:
        show.print_json(
            {
                "leader": None if lock is None or lock.is_released else lock.owner_name,
                "lease_duration_millis": None if lock is None else lock.lease_duration_millis,
                "version": None if lock is None else lock.version,
                "is_released": None if lock is None else lock.is_released,
                "alive": alive,
                "client_version": None if migration is None else migration.client_version,
            }
        )
    else:
        show.echo(describe(lock, alive=alive))
        version = "none recorded"
        if migration is not None:
            version = f"{migration.client_version}, set by {migration.modified_by}"
        show.echo(f"client version: {version}")
    if wait and not alive:
        raise typer.Exit(FAILED)


def describe(lock: LeaderLock | None, *, alive: bool | None) -> str:
    """Describe the lock in one line."""
    if lock is None:
        return "no leader: there is no lock"
    if lock.is_released:
        return f"no leader: {lock.owner_name} released the lock"
    state = {None: "", True: ", alive", False: ", not renewed: another leader may take it"}[alive]
    return (
        f"leader {lock.owner_name} (lock of {lock.lease_duration_millis / 1000:g} s, "
        f"version {lock.version}){state}"
    )


def wait_for_renewal(table: CoordinatorStateTable, first: LeaderLock, clock: Clock) -> bool:
    """Whether the lock is renewed, or taken by a new leader, within its duration."""
    end = clock.monotonic() + first.lease_duration_millis / 1000
    while clock.monotonic() < end:
        clock.sleep(POLL_SECONDS)
        now = table.read_lock()
        if now is not None and now.version != first.version:
            return not now.is_released
    return False
