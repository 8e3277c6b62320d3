"""Define a pipeline: the object that users write.

Example::

    def per_minute(records: DataFrame) -> DataFrame: ...

    orders = KinesisPipeline(
        name="orders",
        streams=["orders"],
        transform=per_minute,
        sink=DeltaSink("lake/orders_per_minute"),
        workers=Fleet(min=2, max=8),
    )
    defs = orders.definitions()
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from kcl_pipeline.arguments import check_text, checked_arguments, function_name
from kcl_pipeline.aws import (
    AwsClients,
    open_fan_out,
    open_kinesis,
    open_tables,
)
from kcl_pipeline.aws.configs import LEADER_THREADS
from kcl_pipeline.clock import Clock, StopSignal, SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.events import EventSink, ignore_events
from kcl_pipeline.leader.cycle import LeaderCycle
from kcl_pipeline.leader.streams import StreamSelection
from kcl_pipeline.memory import MemoryBudget
from kcl_pipeline.metrics.opening import observed_leader, observed_worker, require_exporters
from kcl_pipeline.metrics.reporter import select_provider
from kcl_pipeline.pipeline.arguments import (
    Fleet,
    check_arguments,
    checked_settings,
    output_path,
    select_function,
)
from kcl_pipeline.pipeline.output import (
    PipelineOutput,
    PipelineSink,
    SessionFactory,
    sink_address,
)
from kcl_pipeline.processors import ProcessorSink
from kcl_pipeline.settings_errors import names_only
from kcl_pipeline.stream_config import StreamForms, StreamSelector
from kcl_pipeline.threads import DaemonPool, spawn_thread
from kcl_pipeline.worker.dependencies import OpenedApplication
from kcl_pipeline.worker.start import open_application, refuse_pause

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from dagster import AssetKey, Definitions
    from pyspark.sql import DataFrame

    from kcl_pipeline.orchestration.options import DagsterOptions
    from kcl_pipeline.status.snapshot import Snapshot
    from kcl_pipeline.worker.worker import Worker

    _Options = ParamSpec("_Options")

    def _like(
        _: Callable[_Options, DagsterOptions],
    ) -> Callable[
        [Callable[..., Definitions]],
        Callable[Concatenate[KinesisPipeline, _Options], Definitions],
    ]: ...

    # Type checkers and editors see the fields of DagsterOptions as keyword arguments.
    _with_options = _like(DagsterOptions)
else:

    def _with_options(function: Callable[..., Any]) -> Callable[..., Any]:
        return function


__all__ = ["Fleet", "KinesisPipeline", "SessionFactory", "sink_address"]


@checked_arguments
@dataclass(frozen=True)
class KinesisPipeline:
    """A KCL application that reads streams, transforms the records and writes them to a sink.

    Set at most one of `transform` and `transform_arrow`. With neither, the sink receives the
    records unchanged. With a `processor` there is neither a transform nor a sink.

    Example:
        >>> import pyarrow as pa
        >>> from kcl_pipeline import DeltaSink, Fleet, KinesisPipeline
        >>> def keys(records: pa.Table) -> pa.Table:
        ...     return records.select(["partition_key", "sequence_number"])
        >>> orders = KinesisPipeline(
        ...     name="orders",
        ...     streams=["orders"],
        ...     transform_arrow=keys,
        ...     sink=DeltaSink("lake/orders"),
        ...     workers=Fleet(min=2, max=8),
        ... )
        >>> defs = orders.definitions(leader_default_running=True)

    Raises:
        SettingsError: An argument is wrong. The message says what to write instead.
    """

    name: str
    """KCL application name. It names the three tables and the Dagster definitions."""
    streams: StreamForms
    """Names or ARNs of the streams, or a `StreamConfig` for each.

    Or a `StreamSelector`, or a function that returns names or ARNs: the leader asks each minute.
    """
    sink: PipelineSink = None  # type: ignore[assignment] # (`processor` sets it)
    """A `DeltaSink` (exactly once), or a function in a `ForeachArrowSink` or a `ForeachBatchSink`
    (at least once)."""
    transform: Callable[[DataFrame], DataFrame] | None = None
    """Takes and returns a Spark DataFrame. The input has the columns of `RECORD_SCHEMA`."""
    transform_arrow: Callable[[pa.Table], pa.Table] | None = None
    """Takes and returns a `pyarrow.Table`, without a JVM."""
    workers: Fleet = field(default_factory=Fleet)
    """How many workers the sensor runs."""
    settings_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from their default.

    An example is `{"lease": {"failover_time_millis": 5000}}`.
    """
    spark_config: Mapping[str, str] = field(default_factory=dict)
    """Spark properties. They override those that this package sets."""
    processor: Callable[[], object] | None = None
    """The class of a `RecordProcessor`, in place of a sink (at least once)."""
    output_asset_key: AssetKey | Sequence[str] | str | None = None
    """Asset key of the output in Dagster, such as `["lake", "orders"]` or `"lake/orders"`.

    None: the pipeline's name and the folder of the table.
    """

    def __post_init__(self) -> None:
        if self.processor is not None:
            object.__setattr__(self, "sink", self._processor_sink(self.processor))
        check_arguments(
            self.name,
            self.streams,
            self.sink,
            self.transform,
            self.transform_arrow,
            self.workers,
            self.spark_config,
        )
        output_path(self.output_asset_key)
        _ = self.settings

    def _processor_sink(self, processor: Callable[[], object]) -> ProcessorSink:
        sink = ProcessorSink(processor)
        if self.sink not in (None, sink):  # `dataclasses.replace` passes both
            raise SettingsError("sink and processor are both set. Write one of them.")
        return sink

    def __repr__(self) -> str:
        return (
            f"KinesisPipeline(name={self.name!r}, streams={self._streams_text()}, "
            f"sink={self.sink!r}, transform={function_name(self.transform)}, "
            f"transform_arrow={function_name(self.transform_arrow)}, workers={self.workers!r}, "
            f"settings_overrides={dict(self.settings_overrides)!r}, "
            f"spark_config={names_only(self.spark_config)!r}, "
            f"output_asset_key={self.output_asset_key!r})"
        )

    def _streams_text(self) -> str:
        if isinstance(self.streams, StreamSelector):
            return repr(self.streams)
        return function_name(self.streams) if callable(self.streams) else repr(list(self.streams))

    @cached_property
    def settings(self) -> ConsumerSettings:
        """All settings, validated."""
        return checked_settings(self.name, self.streams, self.settings_overrides)

    @property
    def output_key(self) -> AssetKey:
        """Asset key of the output, for `deps=[orders.output_key]` of assets that read it."""
        # Dagster is loaded only where it is used
        from kcl_pipeline.orchestration.names import output_key  # noqa: PLC0415

        return output_key(self)

    @_with_options
    def definitions(self, **options: Any) -> Definitions:
        """Build the Dagster definitions: assets, checks, jobs, leader sensor and resources.

        Combine the result with other definitions by `Definitions.merge`.

        Args:
            options: The fields of `DagsterOptions`, by name.

        Raises:
            SettingsError: An option is wrong.
        """
        # Dagster is loaded only where it is used
        from kcl_pipeline.orchestration.definitions import build_definitions  # noqa: PLC0415
        from kcl_pipeline.orchestration.options import DagsterOptions  # noqa: PLC0415

        return build_definitions(self, DagsterOptions(**options))

    def ensure_tables(
        self,
        *,
        clients: AwsClients | None = None,
        clock: Clock | None = None,
        events: EventSink = ignore_events,
        stop: StopSignal | None = None,
    ) -> None:
        """Create the three tables if they are missing, and wait until they can be used.

        Also looks up the streams, and refuses the tables of another application.

        Raises:
            NotFoundError: A stream does not exist.
            AccessDeniedError: A permission is missing.
            IncompatibleTableError: The tables have another layout or client version.
            OtherApplicationError: The tables belong to another application.
            ThrottledError: AWS throttles the calls, also after retries.
            UnavailableError: AWS cannot be reached, also after retries.
            StoppedWhileRetryingError: `stop` was set during the wait before a retry.
        """
        clock, clients = clock or SystemClock(), clients or AwsClients(self.settings)
        self._open(clients, clock, events, stop or clock.signal())

    def _open(
        self, clients: AwsClients, clock: Clock, events: EventSink, stop: StopSignal
    ) -> OpenedApplication:
        tables = open_tables(self.settings, clients, clock)
        return open_application(
            self.settings,
            open_kinesis(self.settings, clients, clock),
            tables.lease,
            tables.workers,
            tables.coordinator,
            sink_address=sink_address(self.sink),
            clock=clock,
            rng=random.SystemRandom(),
            events=events,
            stop=stop,
            select=select_function(self.streams, clients, clock),
        )

    def leases(
        self, *, clients: AwsClients | None = None, clock: Clock | None = None
    ) -> pd.DataFrame:
        """Read the tables, and return the leases as a DataFrame.

        Example:
            >>> leases = orders.leases()  # doctest: +SKIP
            >>> leases.groupby("worker")["kbps"].sum()  # doctest: +SKIP

        Args:
            clients: The boto3 clients. None: those of the standard environment.
            clock: The clock. None: the system clock.

        Returns:
            One row per lease, those that need attention first. `worker` processes the shard,
            `state` is `held`, `no owner`, `ended` or another state, `lag_seconds` is the age of
            the oldest record that is not committed, `kbps` the throughput in KiB/s,
            `checkpoint` the position.
            `kcl-pipeline status --json` has the same columns.

        Raises:
            KclError: The tables cannot be read.
        """
        from kcl_pipeline.status.frames import lease_frame  # noqa: PLC0415 (it loads pandas)

        return lease_frame(self._snapshot(clients, clock))

    def worker_rows(
        self, *, clients: AwsClients | None = None, clock: Clock | None = None
    ) -> pd.DataFrame:
        """Read the tables, and return the workers as a DataFrame.

        Args:
            clients: The boto3 clients. None: those of the standard environment.
            clock: The clock. None: the system clock.

        Returns:
            One row per worker with a row in the worker-metrics table, sorted by id, with `group`,
            the number of `leases`, `kbps`, `cpu_percent`, `lag_seconds` and others.
            `kcl-pipeline status --json` has the same columns.

        Raises:
            KclError: The tables cannot be read.
        """
        from kcl_pipeline.status.frames import worker_frame  # noqa: PLC0415 (it loads pandas)

        separator = self.settings.worker.worker_group_separator
        return worker_frame(self._snapshot(clients, clock), separator)

    def _snapshot(self, clients: AwsClients | None, clock: Clock | None) -> Snapshot:
        from kcl_pipeline.status.snapshot import read_snapshot  # noqa: PLC0415 (few need it)

        clock, clients = clock or SystemClock(), clients or AwsClients(self.settings)
        found = read_snapshot(open_tables(self.settings, clients, clock), self.settings, clock)
        if found.failures:
            raise found.failures[0].error
        return found

    def build_leader(
        self,
        owner_name: str,
        *,
        resume_own_name: bool = False,
        clients: AwsClients | None = None,
        clock: Clock | None = None,
        events: EventSink = ignore_events,
    ) -> LeaderCycle:
        """Build a leader of this application. It reads and writes nothing before its first cycle.

        Args:
            owner_name: Name of the leader in the lock row.
            resume_own_name: Continue with a lock that has this owner name, instead of waiting until
                it expires.
            clients: The boto3 clients. None: those of the standard environment.
            clock: The clock. None: the system clock.
            events: Receives the events of the leader.
        """
        clock = clock or SystemClock()
        clients = clients or AwsClients(self.settings)
        # Its threads start with the first scan of several segments or the first moves
        pool = DaemonPool(LEADER_THREADS, "leader-calls")
        tables = open_tables(self.settings, clients, clock, map_=pool.map)
        events = observed_leader(
            events, tables.coordinator, self.settings, clock, owner_name, clients
        )
        kinesis = open_kinesis(self.settings, clients, clock)
        select = select_function(self.streams, clients, clock)
        return LeaderCycle(
            self.settings,
            tables.lease,
            tables.workers,
            tables.coordinator,
            kinesis,
            clock,
            events,
            owner_name,
            resume_own_name=resume_own_name,
            selection=None if select is None else StreamSelection(select, clock, events),
            map=pool.map,
            spawn=spawn_thread,
            stored=self.output().stored_shards(),
        )

    def build_worker(
        self,
        worker_id: str,
        *,
        session_factory: SessionFactory | None = None,
        clients: AwsClients | None = None,
        clock: Clock | None = None,
        events: EventSink = ignore_events,
        stop: StopSignal | None = None,
        run_id: str | None = None,
        replaces: str | None = None,
        leads: bool = True,
        leader_patience_seconds: float = 0.0,
    ) -> Worker:
        """Build a worker of this application. Creates its tables and its Spark session.

        Args:
            worker_id: Unique among the running workers of the application.
            session_factory: Creates the Spark session. None: by `spark_config`.
            clients: The boto3 clients. None: those of the standard environment.
            clock: The clock. None: the system clock.
            events: Receives the events of the worker.
            stop: Stops the start-up.
            run_id: Identifies this process. None: derived from the worker id and the time.
            replaces: Id of the worker whose leases the leader moves to this one. None: of no
                worker.
            leads: Whether the worker is a standby leader.
            leader_patience_seconds: Time without a leader after which the standby leader leads.

        Raises:
            KclError: As in `ensure_tables`; `ApplicationPausedError` while it is paused.
        """
        check_text("worker_id", worker_id, "Write a name that no other worker has, such as 'w-1'")
        from kcl_pipeline.kinesis.decode import load_conversions  # noqa: PLC0415
        from kcl_pipeline.worker.dependencies import WorkerDependencies  # noqa: PLC0415
        from kcl_pipeline.worker.worker import Worker  # noqa: PLC0415

        clock, clients = clock or SystemClock(), clients or AwsClients(self.settings)
        settings, memory = self.settings, MemoryBudget.of(self.settings)
        require_exporters(settings)
        # Before anything slow, so that the leader can begin
        application = self._open(clients, clock, events, stop or clock.signal())
        refuse_pause(self.name, application.pause)
        tables = open_tables(self.settings, clients, clock)
        events = observed_worker(events, tables.coordinator, settings, clock, worker_id, clients)
        # Before the worker has a row: from then on a leader may give it leases
        load_conversions()
        writer, sink, range_jobs = self.output().open(session_factory, clients, events, memory)
        has_metrics = not settings.worker.disable_worker_metrics
        dependencies = WorkerDependencies(
            worker_id=worker_id,
            settings=settings,
            lease_table=tables.lease,
            worker_table=tables.workers,
            coordinator_table=tables.coordinator,
            kinesis=open_kinesis(settings, clients, clock),
            writer=writer,
            sink=sink,
            clock=clock,
            # Not seeded by the worker id: processes that share it must draw different numbers
            rng=random.SystemRandom(),
            events=events,
            metric=select_provider(clock, events=events) if has_metrics else None,
            leader=self.build_leader(worker_id, clients=clients, clock=clock, events=events)
            if leads
            else None,
            leader_patience_seconds=leader_patience_seconds,
            run_id=run_id or f"{worker_id}@{round(clock.wall() * 1000)}",
            replaces=replaces,
            fan_out=open_fan_out(settings, clients) if range_jobs is None else None,
            range_jobs=range_jobs,
            takes_dead_letters=self.output().takes_dead_letters,
            sink_address=sink_address(self.sink),
            application=application,
            memory=memory,
        )
        return Worker(dependencies)

    def output(self) -> PipelineOutput:
        """Return the fields that decide how batches are written."""
        return PipelineOutput(
            self.name,
            self.settings,
            self.sink,
            self.transform,
            self.transform_arrow,
            self.spark_config,
        )
