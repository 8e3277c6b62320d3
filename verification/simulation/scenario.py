"""The choices of a seed before the run: fleet settings, and a steered fault and incident."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from kcl_pipeline.config import ConsumerSettings, InitialPosition
from verification.simulation.environment.calls import SINK_SITES, Fault
from verification.simulation.environment.streams import OTHER_ACCOUNT, arn_of
from verification.simulation.incidents.choices import CELLS, INCIDENTS

EPOCH: Final = 1_800_000_000.0
TIMESTAMP_SECONDS: Final = 2.5
"""With AT_TIMESTAMP, reading starts this many virtual seconds after the start."""

BEGIN_MILLIS: Final = round((EPOCH + TIMESTAMP_SECONDS) * 1000)

FAILOVER_SECONDS: Final = 2.0
HANDOFF_SECONDS: Final = 2.0
LOCK_SECONDS: Final = 2.5
STALLED_SECONDS: Final = 4.0

REACHED_BY: Final = {
    "workers.DeleteItem": ("deploy",),
    "coordinator.DeleteItem": ("leader_deploy", "leader_deploy"),
    "leases.DeleteItem": ("split", "split"),
    "leases.TransactWriteItems": ("split", "merge"),
    "kinesis.ListShards": ("split", "merge", "retention_trim"),
    "sink.write_dead_letters": ("poison", "poison", "poison"),
}
"""Incidents that cause a rare call, for the seeds that are steered to it."""


NEED_SEVERAL: Final = ("stream_comes", "namesake_comes", "stream_goes")
"""Incidents of applications with several streams, for the seeds that are steered to them."""

_NAMESAKES: Final = 0.4
"""Share of the applications with two streams whose streams have one name in two accounts."""

_TWO_STREAMS: Final = 0.2
_EXACTLY_ONCE: Final = 0.8
_REPORTS_CPU: Final = 0.3
_HANDS_BACK: Final = 0.3
_SAVES_SCANS: Final = 0.7
_LEADERLESS: Final = 0.25


@dataclass(frozen=True, slots=True)
class Scenario:
    """The fleet of one seed.

    Attributes:
        aggregates: Share of puts that are KPL aggregates.
        steered: A (call site, fault) that happens at the site's call number `steered_call`.
        rehearsal: After the storm, check a steady load and a graceful stop, too.
        reports_cpu: Workers report a utilization.
        scan_page_rows: Rows per call of a scan; None: one call for all.
        hands_back: The transform returns records that it cannot process with an error, and does not
            raise.
        saves_scans: Leaders check for changes, and scan the tables only now and then.
        leaderless: The workers take leases from each other; a leader only creates and deletes them.
    """

    streams: tuple[str, ...] = ("events",)
    initial_position: InitialPosition = "TRIM_HORIZON"
    exactly_once: bool = True
    aggregates: float = 0.0
    steered: tuple[str, Fault] | None = None
    steered_call: int = 1
    rehearsal: bool = False
    reports_cpu: bool = False
    scan_page_rows: int | None = None
    hands_back: bool = False
    saves_scans: bool = False
    leaderless: bool = False

    @property
    def sink_address(self) -> str | None:
        """The address that workers record. None: they record none."""
        return "delta:/table" if self.exactly_once else None

    @property
    def stores_positions(self) -> bool:
        """Whether the sink stores positions, and leaders ask it for them."""
        return self.exactly_once


def scenario_of(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(f"{seed}/scenario")
    site, fault = CELLS[seed % len(CELLS)]
    beginning: list[InitialPosition] = ["TRIM_HORIZON"]
    positions: list[InitialPosition] = ["LATEST", "AT_TIMESTAMP", *beginning * 6]
    streams: tuple[str, ...] = ("events", "orders") if rng.random() < _TWO_STREAMS else ("events",)
    if INCIDENTS[seed % len(INCIDENTS)] in NEED_SEVERAL or len(streams) > 1:
        is_namesake = random.Random(f"{seed}/namesake").random() < _NAMESAKES
        streams = ("events", arn_of(OTHER_ACCOUNT, "events") if is_namesake else "orders")
    return Scenario(
        streams=streams,
        initial_position=rng.choice(positions),
        exactly_once=site in SINK_SITES or rng.random() < _EXACTLY_ONCE,
        aggregates=rng.choice((0.0, 0.3)),
        steered=(site, fault),
        steered_call=1
        if site in REACHED_BY or site == "sink.ensure"
        else rng.randint(1, 40)
        if site in _FREQUENT
        else rng.randint(1, 3),
        rehearsal=seed % 5 == 0,
        reports_cpu=rng.random() < _REPORTS_CPU,
        scan_page_rows=rng.choice((None, None, 2, 4)),
        hands_back=rng.random() < _HANDS_BACK,
        saves_scans=random.Random(f"{seed}/scans").random() < _SAVES_SCANS,
        leaderless=random.Random(f"{seed}/leaderless").random() < _LEADERLESS,
    )


_FREQUENT: Final = frozenset(
    {
        "leases.GetItem",
        "leases.UpdateItem",
        "leases.Scan",
        "leases.Query",
        "workers.UpdateItem",
        "kinesis.GetRecords",
        "sink.commit",
    }
)


@lru_cache(maxsize=100)
def settings(scenario: Scenario, strategy: str, *, quirky: bool = False) -> ConsumerSettings:
    """Settings with short times, so that a storm of half a minute has many failovers.

    A quirky peer does no handoff and releases nothing at shutdown.
    """
    shard_sync: dict[str, object] = {
        "completed_lease_cleanup_interval_millis": 1_000,
        "garbage_lease_cleanup_interval_millis": 3_000,
        "leases_recovery_auditor_execution_frequency_millis": 1_000,
        "list_shards_backoff_time_millis": 50,
        "initial_position_in_stream": scenario.initial_position,
    }
    if scenario.initial_position == "AT_TIMESTAMP":
        shard_sync["initial_timestamp"] = datetime.fromtimestamp(EPOCH + TIMESTAMP_SECONDS, UTC)
    return ConsumerSettings.model_validate(
        {
            "application_name": "simulated",
            "streams": scenario.streams,
            "lease": {
                "failover_time_millis": round(FAILOVER_SECONDS * 1000),
                "lease_discovery_interval_millis": 500,
                "graceful_lease_handoff_timeout_millis": round(HANDOFF_SECONDS * 1000),
                "is_graceful_lease_handoff_enabled": not quirky,
                "release_leases_on_shutdown": not quirky,
            },
            "assignment": {
                "lease_assignment_interval_millis": 3_000 if scenario.saves_scans else 1_000,
                "variance_balancing_frequency": 1 if scenario.saves_scans else 3,
                "lease_assignment_strategy": strategy,
            },
            "coordination": "leaderless" if scenario.leaderless else "leader",
            "leader": {
                "leader_lease_duration_millis": round(LOCK_SECONDS * 1000),
                "leader_heartbeat_period_millis": 800,
            },
            "worker": {
                "worker_metrics_reporter_freq_in_millis": 1_000,
                "in_memory_worker_metrics_capture_frequency_millis": 1_000,
                "parent_shard_poll_interval_millis": 500,
                "task_backoff_time_millis": 200,
                "shard_stalled_after_millis": round(STALLED_SECONDS * 1000),
            },
            "shard_sync": shard_sync,
            "retrieval": {
                "fetch_threads": 1,
                "idle_time_between_reads_in_millis": 300,
                "max_records": 50,
            },
            "batch": {
                "min_batch_interval_millis": 200,
                "failed_records": "dead_letter",
                "max_batch_records": 25,
            },
        }
    )
