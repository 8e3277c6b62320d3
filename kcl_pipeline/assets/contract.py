"""What Dagster's face needs of a pipeline: small protocols, so that it can be tested with fakes.

`kcl_pipeline.pipeline.KinesisPipeline` is the real one.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from dagster import FreshnessPolicy

from kcl_pipeline.arguments import check_flag, check_number, check_options, check_texts
from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.events import EventSink
from kcl_pipeline.leader.report import CycleReport
from kcl_pipeline.settings_errors import wrong
from kcl_pipeline.worker.summary import WorkerProgress, WorkerSummary

Mode = Literal["drain", "continuous"]

_SECONDS: Final = "a time in seconds"
_MOST_SECONDS: Final = 365 * 86_400.0
_GROUP: Final = re.compile(r"[A-Za-z0-9_]{1,100}")
SessionFactory = Callable[[], Any]
"""Gives the Spark session of this process."""


class FleetLike(Protocol):
    """How many continuous workers are wanted: at least `min`, at most `max`, both inclusive."""

    @property
    def min(self) -> int:
        """Kept running while the leader sensor is on."""
        ...

    @property
    def max(self) -> int:
        """Never exceeded by the leader sensor."""
        ...


class WorkerLike(Protocol):
    """One worker, ready to run."""

    def run(
        self,
        stop: StopSignal,
        *,
        mode: Mode,
        on_progress: Callable[[WorkerProgress], None],
        progress_seconds: float,
    ) -> WorkerSummary:
        """Consume until `stop` is set, a drain is asked for, or (mode drain) all that is there now
        is in the table. Releases everything, then raises errors.
        """
        ...


class LeaderCycleLike(Protocol):
    """The leader as a function that is called again and again."""

    def run_once(self, deadline_seconds: float) -> CycleReport:
        """One bounded, idempotent cycle."""
        ...

    def release(self) -> None:
        """Give the lock up if it is held."""
        ...


class PipelineLike(Protocol):
    """The user's object."""

    @property
    def name(self) -> str:
        """The application name."""
        ...

    @property
    def settings(self) -> ConsumerSettings:
        """All settings of the application."""
        ...

    @property
    def workers(self) -> FleetLike:
        """How many continuous workers."""
        ...

    @property
    def sink(self) -> Any:
        """Where the output goes; a `DeltaSink` has the table's address."""
        ...

    @property
    def transform(self) -> Callable[..., Any] | None:
        """The user's function of a Spark DataFrame; None: the pipeline works on Arrow and needs no
        session.
        """
        ...

    def build_worker(
        self,
        worker_id: str,
        *,
        session_factory: SessionFactory | None,
        clients: Any,
        clock: Clock,
        events: EventSink,
        stop: StopSignal,
        run_id: str | None,
        leads: bool,
        leader_patience_seconds: float,
    ) -> WorkerLike:
        """A worker of this application; with `leads` it leads when nobody else has for
        `leader_patience_seconds`.
        """
        ...

    def build_leader(
        self,
        owner_name: str,
        *,
        resume_own_name: bool,
        clients: Any,
        clock: Clock,
        events: EventSink,
    ) -> LeaderCycleLike:
        """A leader of this application; with `resume_own_name` a lock under the same name is taken
        up again at once.
        """
        ...


@dataclass(frozen=True, slots=True)
class DagsterOptions:
    """How a pipeline shows itself in Dagster. Times in seconds.

    `progress_seconds`: a running worker reports one materialization in this time. `owners` as
    Dagster wants them (e-mail or `team:...`). `freshness` None: no policy. `lag_threshold_seconds`:
    the check `lag_below_threshold` warns above it. `scale_up_lag_seconds` None: the sensor keeps
    `workers.min` and never grows by itself.
    """

    leader_default_running: bool = False
    progress_seconds: float = 60.0
    group_name: str | None = None
    owners: tuple[str, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    freshness: FreshnessPolicy | None = None
    lag_threshold_seconds: float = 60.0
    scale_up_lag_seconds: float | None = 120.0
    tick_deadline_seconds: float = 20.0

    def __post_init__(self) -> None:
        """Raises `SettingsError`."""
        check_flag("leader_default_running", self.leader_default_running)
        check_number("progress_seconds", self.progress_seconds, _SECONDS, least=0.1, most=86_400)
        if self.group_name is not None and not _GROUP.fullmatch(str(self.group_name)):
            advice = "Write 1 to 100 of the characters A-Z a-z 0-9 _, or None"
            raise wrong("group_name", self.group_name, "is not a name of a group", advice)
        check_texts("owners", self.owners, "Write owners=['team:data', 'me@example.com']")
        check_options("tags", self.tags, "{'domain': 'orders'}")
        freshness: object = self.freshness
        if freshness is not None and not isinstance(freshness, FreshnessPolicy):
            advice = "Write a dagster.FreshnessPolicy, or None"
            raise wrong("freshness", freshness, "is not a freshness policy", advice)
        check_number(
            "lag_threshold_seconds", self.lag_threshold_seconds, _SECONDS, most=_MOST_SECONDS
        )
        check_number(
            "scale_up_lag_seconds",
            self.scale_up_lag_seconds,
            _SECONDS,
            most=_MOST_SECONDS,
            optional=True,
        )
