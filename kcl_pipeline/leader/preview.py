"""Compute what a leader would do now, without writes: `kcl-pipeline plan`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import SystemRandom

from kcl_pipeline.clock import Clock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import STREAM_ERRORS
from kcl_pipeline.events import ignore_events
from kcl_pipeline.kinesis.client import KinesisClient
from kcl_pipeline.leader.assign import Scan, StreamCoverage, scan
from kcl_pipeline.leader.liveness import Liveness
from kcl_pipeline.leader.streams import Streams
from kcl_pipeline.leader.sync import (
    LeaseMap,
    has_unreadable_shards,
    initial_leases,
    keys_of,
    missing_leases,
    stream_coverage,
)
from kcl_pipeline.leases.application import ApplicationRecord
from kcl_pipeline.leases.row import BadRow, Lease
from kcl_pipeline.leases.workers import WorkerMetricsTable
from kcl_pipeline.leases.writes import LeaseTable
from kcl_pipeline.planning import strategies
from kcl_pipeline.planning.cleanup import Deletion, completed_leases
from kcl_pipeline.planning.model import Plan, PlanInput
from kcl_pipeline.planning.state import prepare, whole_plan
from kcl_pipeline.worker_status import UnavailableStream


@dataclass(frozen=True, slots=True)
class Preview:
    """The actions of a leader.

    Attributes:
        bad_rows: Rows of both tables that cannot be used.
        expired: Keys of expired leases. Known only if `observed_seconds` is longer than the grace
            period of owners.
        coverage: Hash-range coverage of each stream.
        unavailable: Streams that are missing or forbidden, with the reason.
        create: Leases that the leader would create.
        delete: Leases that the leader would delete after they have been finished long enough.
        plan: The plan, including the leases in `create`.
        plan_input: The input of the plan.
        observed_seconds: Time between the two scans. 0: one scan.
    """

    bad_rows: tuple[BadRow, ...]
    expired: tuple[str, ...]
    coverage: tuple[StreamCoverage, ...]
    unavailable: tuple[UnavailableStream, ...]
    create: tuple[Lease, ...]
    delete: tuple[Deletion, ...]
    plan: Plan
    plan_input: PlanInput
    observed_seconds: float


def preview(
    settings: ConsumerSettings,
    lease_table: LeaseTable,
    worker_table: WorkerMetricsTable,
    kinesis: KinesisClient,
    clock: Clock,
    *,
    record: ApplicationRecord | None = None,
    observe_seconds: float = 0.0,
) -> Preview:
    """Scan the tables once, or twice with a wait, and plan like the leader.

    After one scan, all owners and workers count as alive. To recognise expired leases, wait longer
    than failover time plus discovery interval. To recognise stopped workers, wait for three
    reporting periods.

    Args:
        settings: All settings.
        lease_table: The lease table.
        worker_table: The worker-metrics table.
        kinesis: The Kinesis client.
        clock: The clock.
        record: The recorded streams, which the leader reads besides those of the settings.
        observe_seconds: Time between the two scans. 0: one scan.

    Raises:
        SettingsError: The assignment strategy is unknown.
        AwsError: A call failed. If it is about one of several streams, the stream is left out.
    """
    strategy = strategies.get(settings.assignment.lease_assignment_strategy)
    liveness = Liveness(settings)
    found = scan(lease_table, worker_table, clock, is_multi_stream=settings.is_multi_stream)
    _observe(liveness, found)
    if observe_seconds > 0:
        clock.sleep(observe_seconds)
        found = scan(lease_table, worker_table, clock, is_multi_stream=settings.is_multi_stream)
        _observe(liveness, found)
    streams = Streams(settings, kinesis, clock, ignore_events, "preview", rng=SystemRandom())
    if record is not None:
        streams.note_record(record.identity)
    create, coverage = _missing(settings, found, kinesis, streams)
    seen = liveness.observation(found.scan_started)
    if observe_seconds < liveness.settling_seconds:
        seen = replace(seen, unconfirmed=frozenset())
    prepared = prepare(
        (*found.leases, *create),
        liveness.living(found.scan_started),
        seen,
        settings.assignment,
        group_separator=settings.worker.worker_group_separator,
        balance=True,
    )
    return Preview(
        bad_rows=found.bad_rows,
        expired=tuple(sorted(seen.expired)),
        coverage=coverage,
        unavailable=streams.unavailable(),
        create=create,
        delete=completed_leases(found.leases, {}, 0.0)
        if settings.shard_sync.cleanup_leases_upon_shard_completion
        else (),
        plan=whole_plan(strategy(prepared.given), prepared),
        plan_input=prepared.given,
        observed_seconds=observe_seconds,
    )


def _missing(
    settings: ConsumerSettings, scan: Scan, kinesis: KinesisClient, streams: Streams
) -> tuple[tuple[Lease, ...], tuple[StreamCoverage, ...]]:
    """The leases that a leader would create, and the coverage of each stream without them."""
    leases, create = LeaseMap(scan.leases), list[Lease]()
    recreated = {lease.recreated_millis for lease in scan.leases} - {None}
    coverage: list[StreamCoverage] = []
    for name in streams.names():
        try:
            stream = streams.resolve(name)
        except STREAM_ERRORS:
            if not settings.is_multi_stream:
                raise
            continue
        shard_sync = streams.shard_sync_of(stream)
        if stream.created_millis in recreated:
            stream = replace(stream, recreated_millis=stream.created_millis)
        rows, unreadable = leases.of_stream(stream), keys_of(scan.unreadable, stream)
        coverage.append(stream_coverage(stream, rows, 0))
        if not rows and not has_unreadable_shards(kinesis, stream, unreadable):
            create += initial_leases(kinesis, shard_sync, stream)
        elif not coverage[-1].complete:
            create += missing_leases(
                shard_sync,
                rows,
                unreadable,
                kinesis.list_shards(stream),
                stream,
            )
    return tuple(create), tuple(coverage)


def _observe(liveness: Liveness, scan: Scan) -> None:
    times, bad = (scan.scan_started, scan.scan_finished), scan.unreadable_workers
    liveness.observe(scan.leases, scan.workers, *times, unreadable=bad)
