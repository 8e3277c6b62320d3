"""Derive the pipeline of a replay from the pipeline whose records it replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.delta.address import table_root
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.events import EventSink
from kcl_pipeline.kinesis.client import ARRIVAL_TOLERANCE
from kcl_pipeline.leases.application.replay_record import ReplayRecord

if TYPE_CHECKING:
    from kcl_pipeline.worker.worker import Worker

_OF_ARGUMENTS: Final = ("application_name", "streams", "stream_settings", "selects_streams")
_TABLES: Final = ("lease_table", "worker_metrics_table", "coordinator_state_table")
_OF_TABLE: Final = ("table_name", "deletion_protection_enabled", "point_in_time_recovery_enabled")
_OF_FLEET: Final = (
    "max_leases_for_worker",
    "max_leases_for_group",
    "max_throughput_per_host_kbps",
    "max_throughput_per_group_kbps",
)
_OF_POSITION: Final = ("former_streams", "former_streams_leases_deletion_strategy")
_OF_FAN_OUT: Final = ("consumer_name", "consumer_arns", "retrieval_mode")
MAX_BATCH_RECORDS: Final = 10_000
"""Most dead letters of a batch: all of them may fail again, and each has to be isolated."""


class ReplayPipeline(Protocol):
    """The part of a `KinesisPipeline` that a replay needs."""

    @property
    def settings(self) -> ConsumerSettings:
        """All settings."""
        ...

    @property
    def sink(self) -> Any:
        """The sink."""
        ...

    def ensure_tables(
        self, *, clients: Any, clock: Clock, events: EventSink, stop: StopSignal
    ) -> None:
        """See `KinesisPipeline.ensure_tables`."""
        ...

    def build_worker(
        self,
        worker_id: str,
        *,
        session_factory: Any,
        clients: Any,
        clock: Clock,
        events: EventSink,
        stop: StopSignal,
        run_id: str,
    ) -> Worker:
        """See `KinesisPipeline.build_worker`."""
        ...


def replay_pipeline(
    pipeline: object,
    name: str,
    record: ReplayRecord,
    streams: Sequence[str],
    *,
    of_letters: bool = False,
) -> ReplayPipeline:
    """Return the pipeline of a replay: another application, the same transform.

    It polls, because only then a time range can be read, and one worker may hold all leases. Its
    tables have default names, so that it never uses those of the pipeline.

    Args:
        pipeline: The `KinesisPipeline`.
        name: Application name of the replay.
        record: What is replayed.
        streams: Names or ARNs of the streams.
        of_letters: Whether dead letters are replayed, which this process reads by itself.

    Raises:
        SettingsError: The side table is not possible.
    """
    original = cast("ReplayPipeline", pipeline)
    settings = original.settings.model_dump(exclude_unset=True)
    settings = _without(settings, (*_OF_ARGUMENTS, "metrics"))
    for table in _TABLES:
        settings[table] = _without(settings.get(table, {}), _OF_TABLE)
    settings["assignment"] = _without(settings.get("assignment", {}), _OF_FLEET)
    most = min(original.settings.batch.max_batch_records, MAX_BATCH_RECORDS)
    changes = _of_dead_letters(most) if of_letters else _of_range(record)
    settings["shard_sync"] = _without(settings.get("shard_sync", {}), _OF_POSITION)
    settings["retrieval"] = _without(settings.get("retrieval", {}), _OF_FAN_OUT)
    for group, values in changes.items():
        settings[group] = {**settings.get(group, {}), **values}
    derived = replace(
        cast("Any", pipeline),
        name=name,
        streams=list(streams),
        sink=_sink(original.sink, record.into),
        settings_overrides=settings,
    )
    return cast("ReplayPipeline", derived)


def _of_range(record: ReplayRecord) -> dict[str, dict[str, Any]]:
    """Return the settings that read the records of a time range."""
    return {
        "shard_sync": {
            "initial_position_in_stream": "AT_TIMESTAMP",
            "initial_timestamp": record.begin - ARRIVAL_TOLERANCE,
        },
        "retrieval": {"arrived_from": record.begin, "arrived_before": record.end},
    }


def _of_dead_letters(batch_records: int) -> dict[str, dict[str, Any]]:
    """Return the settings that let each dead letter fail again. This process has the records."""
    return {
        "retrieval": {"arrived_from": None, "arrived_before": None, "fetch_on": "driver"},
        # A record that fails again becomes a dead letter again, also if all of them fail.
        "batch": {
            "max_batch_records": batch_records,
            "failed_records": "dead_letter",
            "max_dead_letter_share": 1.0,
            "max_dead_letters_per_batch": batch_records,
        },
    }


def _sink(sink: Any, into: str | None) -> Any:
    if into is None:
        return sink
    if not isinstance(sink, DeltaSink):
        raise SettingsError(
            f"--into needs a DeltaSink: the function of the {type(sink).__name__} chooses its "
            "table; write --in-place"
        )
    if table_root(into) in (table_root(sink.uri), table_root(sink.dead_letters)):
        raise SettingsError(
            f"--into {into} is the table of the pipeline or of its dead letters; write another "
            "address, or --in-place"
        )
    return replace(sink, uri=into, dead_letter_uri=None)


def _without(values: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
