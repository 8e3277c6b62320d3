"""`kcl-pipeline leases`: show the leases with owner, state, checkpoint and lag."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.control.operator import refuse_options_before
from kcl_pipeline.cli.target import Application, AsJson, Pipeline, Streams, target
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.state.worker_status import MAX_LAGS
from kcl_pipeline.leases.tables import WorkerMetrics

NO_OWNER = "(no owner)"


class By(StrEnum):
    """What `--by` groups leases by."""

    WORKER = "worker"
    GROUP = "group"


def leases(
    ctx: typer.Context,
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    by: Annotated[
        By | None,
        typer.Option(
            "--by", help="Count the leases per worker, or per worker group.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the leases: owner, state, checkpoint, throughput and lag.

    The lag is that of committed data, with the age of the worker's report.
    """
    refuse_options_before(ctx.invoked_subcommand, application, stream, pipeline, by, as_json)
    if ctx.invoked_subcommand is not None:
        return
    app = target(application, stream, pipeline)
    listing = app.tables.lease.list_leases()
    rows = sorted(listing.leases, key=lambda lease: lease.lease_key)
    reported = app.tables.workers.scan_workers().workers
    paused, lags = paused_leases(reported), Lags(reported, app.clock.wall())
    if by is not None:
        _print_sums(rows, by, app.settings.worker.worker_group_separator, as_json=as_json)
    elif as_json:
        show.print_json([as_dict(lease, paused) | lags.as_dict(lease) for lease in rows])
    else:
        show.print_table(
            f"Leases of {app.settings.application_name}",
            ["lease", "owner", "state", "checkpoint", "counter", "KiB/s", "lag"],
            [[*_row(lease, paused), lags.text(lease)] for lease in rows],
            numbers=["counter", "KiB/s", "lag"],
        )
    show.print_bad_rows(listing.bad_rows)


Paused = Mapping[tuple[str | None, str], str]
"""By worker id and lease key, why the worker has paused the shard."""


def paused_leases(workers: Iterable[WorkerMetrics]) -> Paused:
    """The paused shards that the workers reported."""
    return {
        (worker.worker_id, one.lease_key): one.reason
        for worker in workers
        if worker.status is not None
        for one in worker.status.paused
    }


class Lags:
    """The lag of each lease, as the workers reported it last.

    Args:
        workers: Rows of the worker-metrics table.
        now: Epoch seconds. Used for the age of a report, which is for display only because it
            compares the clocks of two hosts.
    """

    def __init__(self, workers: Iterable[WorkerMetrics], now: float) -> None:
        self._now = now
        self._rows = {worker.worker_id: worker for worker in workers}

    def of(self, lease: Lease) -> tuple[int, float, bool] | None:
        """The lag in milliseconds, its age in seconds, and whether it is an upper bound.

        A row lists the leases with the largest lags. Other leases have at most the smallest of
        these. None if the lag is not known.
        """
        row = self._rows.get(lease.actual_owner or "")
        if lease.ended or row is None or row.status is None:
            return None
        age = max(self._now - row.last_update_seconds, 0.0)
        lags = row.status.lags
        found = next((one for one in lags if one.lease_key == lease.lease_key), None)
        if found is not None:
            return found.millis, age, False
        is_complete = len(lags) < MAX_LAGS and not row.status.more_lags
        return None if is_complete or not lags else (lags[-1].millis, age, True)

    def text(self, lease: Lease) -> str:
        """The lag as text, for example "12.5 s (3 s ago)"."""
        found = self.of(lease)
        if found is None:
            if lease.ended or lease.owner is None:
                return show.NONE
            row = self._rows.get(lease.actual_owner or "")
            return "unknown" if row is None or row.status is None else "not read yet"
        millis, age, at_most = found
        return f"{'<= ' if at_most else ''}{millis / 1000:.1f} s ({show.age(age)} ago)"

    def as_dict(self, lease: Lease) -> dict[str, Any]:
        """The lag for JSON output."""
        millis, age, at_most = self.of(lease) or (None, None, False)
        return {
            "lag_millis": millis,
            "lag_is_upper_bound": at_most,
            "lag_age_seconds": None if age is None else round(age, 1),
        }


def state(lease: Lease, paused: Paused | None = None) -> str:
    """The state of a lease: ended, handoff to a worker, free, paused or held."""
    if lease.ended:
        return "ended"
    if lease.in_handoff:
        return f"handoff to {lease.owner or NO_OWNER}"
    if lease.owner is None:
        return "free"
    return "paused" if (lease.owner, lease.lease_key) in (paused or {}) else "held"


def _row(lease: Lease, paused: Paused) -> Sequence[str]:
    return [
        lease.lease_key,
        lease.actual_owner or NO_OWNER,
        state(lease, paused),
        str(lease.checkpoint),
        str(lease.counter),
        show.number(lease.throughput_kbps),
    ]


def as_dict(lease: Lease, paused: Paused | None = None) -> dict[str, Any]:
    """All fields of a lease for JSON output. Hash keys are strings, because they have 128 bits."""
    keys = lease.hash_key_range
    found = state(lease, paused)
    return {
        "lease_key": lease.lease_key,
        "stream": lease.stream,
        "shard_id": lease.shard_id,
        "owner": lease.owner,
        "checkpoint_owner": lease.checkpoint_owner,
        "state": "handoff" if lease.in_handoff and not lease.ended else found,
        "paused_because": (paused or {}).get((lease.owner, lease.lease_key))
        if found == "paused"
        else None,
        "checkpoint": str(lease.checkpoint),
        "pending_checkpoint": None
        if lease.pending_checkpoint is None
        else str(lease.pending_checkpoint),
        "counter": lease.counter,
        "owner_switches_since_checkpoint": lease.owner_switches_since_checkpoint,
        "throughput_kbps": lease.throughput_kbps,
        "parent_shard_ids": sorted(lease.parent_shard_ids),
        "child_shard_ids": sorted(lease.child_shard_ids),
        "hash_key_range": None if keys is None else [str(keys.start), str(keys.end)],
    }


def group_of(worker_id: str, separator: str) -> str:
    """The worker's group: its id up to the first separator."""
    return worker_id.partition(separator)[0]


def _print_sums(rows: Iterable[Lease], by: By, separator: str, *, as_json: bool) -> None:
    held: dict[str, list[Lease]] = defaultdict(list)
    for lease in rows:
        owner = lease.actual_owner
        held[
            NO_OWNER if owner is None else owner if by is By.WORKER else group_of(owner, separator)
        ].append(lease)
    sums: list[dict[str, Any]] = [
        {
            by.value: name,
            "leases": sum(not lease.ended for lease in mine),
            "ended": sum(lease.ended for lease in mine),
            "handing_over": sum(lease.in_handoff for lease in mine),
            "throughput_kbps": round(
                sum(lease.throughput_kbps or 0.0 for lease in mine if not lease.ended), 1
            ),
        }
        for name, mine in sorted(held.items())
    ]
    if as_json:
        show.print_json(sums)
        return
    columns = [by.value, "leases", "ended", "in handoff", "KiB/s"]
    show.print_table(
        f"Leases by {by.value}",
        columns,
        [[str(value) for value in s.values()] for s in sums],
        numbers=columns[1:],
    )
