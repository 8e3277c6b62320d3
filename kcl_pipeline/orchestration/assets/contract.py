"""Define what the Dagster packages need of a pipeline, as protocols that tests can fake.

`kcl_pipeline.pipeline.KinesisPipeline` implements `PipelineLike`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from kcl_pipeline.arguments import check_flag, check_number, check_options, check_texts
from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.events import EventSink
from kcl_pipeline.settings_errors import wrong
from kcl_pipeline.status.limits import CheckLimits

if TYPE_CHECKING:
    from kcl_pipeline.leader.cycle import LeaderCycle
    from kcl_pipeline.worker.worker import Worker

Mode = Literal["drain", "continuous"]

_SECONDS: Final = "a time in seconds"
_MAX_SECONDS: Final = 365 * 86_400.0
_GROUP: Final = re.compile(r"[A-Za-z0-9_]{1,100}")
SessionFactory = Callable[[], Any]
"""Returns the Spark session of this process."""


class FleetLike(Protocol):
    """Number of continuous workers, from `min` to `max` (both inclusive), and their runs."""

    @property
    def min(self) -> int:
        """Kept running while the leader sensor is on."""

    @property
    def max(self) -> int:
        """Never exceeded by the leader sensor."""

    @property
    def run_tags(self) -> Mapping[str, str]:
        """The user's tags of the runs that the leader sensor starts."""

    @property
    def max_starting(self) -> int:
        """How many runs may be queued or starting at once."""

    @property
    def rolling_replacement(self) -> bool:
        """Whether the leader sensor replaces workers of another version."""

    @property
    def code_version(self) -> str | None:
        """The version of the user's code; None for a digest of its files."""


class PipelineLike(Protocol):
    """A pipeline, as the user defines it."""

    @property
    def name(self) -> str:
        """The application name."""

    @property
    def settings(self) -> ConsumerSettings:
        """All settings of the application."""

    @property
    def workers(self) -> FleetLike:
        """Number of continuous workers."""

    @property
    def sink(self) -> Any:
        """Where batches go. A `DeltaSink` has the table's address."""

    @property
    def transform(self) -> Callable[..., Any] | None:
        """The user's function of a Spark DataFrame; None on the Arrow path, without a session."""

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
    ) -> "Worker":
        """Build a worker of this application.

        With `leads` it contains a standby leader, which takes a lock that is absent for
        `leader_patience_seconds`.
        """

    def build_leader(
        self,
        owner_name: str,
        *,
        resume_own_name: bool,
        clients: Any,
        clock: Clock,
        events: EventSink,
    ) -> "LeaderCycle":
        """Build a leader of this application.

        With `resume_own_name` it takes a lock that already has `owner_name` without waiting.
        """


@dataclass(frozen=True, slots=True)
class DagsterOptions:
    """How a pipeline appears in Dagster. Times are in seconds.

    Attributes:
        leader_default_running: Whether the leader sensor is running by default.
        progress_seconds: The sensor reports the output once per this time.
        group_name: Asset group; None uses the pipeline's name.
        owners: Owners as Dagster defines them (an e-mail address or `team:...`).
        tags: Tags of the assets.
        lag_threshold_seconds: The check `lag_below_threshold` warns above this lag.
        scale_up_lag_seconds: The sensor starts one more worker above this lag; None keeps
            `workers.min`.
        scale_up_cpu_percent: The sensor starts one more worker above this mean CPU of the workers.
            None: 80, or no limit with Dagster's default launcher. 100: no limit.
        tick_deadline_seconds: Longest duration of the leader cycles of a tick.
        check_limits: When the other checks fail.
    """

    leader_default_running: bool = False
    progress_seconds: float = 60.0
    group_name: str | None = None
    owners: tuple[str, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    lag_threshold_seconds: float = 60.0
    scale_up_lag_seconds: float | None = 120.0
    scale_up_cpu_percent: float | None = None
    tick_deadline_seconds: float = 20.0
    check_limits: CheckLimits = field(default_factory=CheckLimits)

    def __post_init__(self) -> None:
        """Raises `SettingsError`."""
        check_flag("leader_default_running", self.leader_default_running)
        check_number("progress_seconds", self.progress_seconds, _SECONDS, least=0.1, most=86_400)
        if self.group_name is not None and not _GROUP.fullmatch(str(self.group_name)):
            advice = "Write 1 to 100 of the characters A-Z a-z 0-9 _, or None"
            raise wrong("group_name", self.group_name, "is not a group name", advice)
        check_texts("owners", self.owners, "Write owners=['team:data', 'me@example.com']")
        check_options("tags", self.tags, "{'domain': 'orders'}")
        limits: object = self.check_limits
        if not isinstance(limits, CheckLimits):
            advice = "Write CheckLimits(lag_error_seconds=600), or leave it out"
            raise wrong("check_limits", limits, "is not a CheckLimits", advice)
        check_number(
            "lag_threshold_seconds", self.lag_threshold_seconds, _SECONDS, most=_MAX_SECONDS
        )
        check_number(
            "scale_up_lag_seconds",
            self.scale_up_lag_seconds,
            _SECONDS,
            most=_MAX_SECONDS,
            optional=True,
        )
        percent = self.scale_up_cpu_percent
        check_number("scale_up_cpu_percent", percent, "a percentage", most=100, optional=True)
