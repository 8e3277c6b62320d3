"""Define what the Dagster packages need of a pipeline, and how it appears in Dagster.

`kcl_pipeline.pipeline.KinesisPipeline` implements `PipelineLike`, which tests can fake.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol

import dagster as dg
from pydantic import ConfigDict, Field, field_validator

from kcl_pipeline.arguments import check_function, check_options, check_texts
from kcl_pipeline.checked_fields import CheckedFields
from kcl_pipeline.clock import Clock, StopSignal
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.events import EventSink
from kcl_pipeline.orchestration.resources import AwsResource
from kcl_pipeline.settings_errors import suggestion, wrong
from kcl_pipeline.status.limits import CheckLimits

if TYPE_CHECKING:
    from kcl_pipeline.leader.cycle import LeaderCycle
    from kcl_pipeline.orchestration.spark import SparkSource
    from kcl_pipeline.worker.worker import Worker

    _SparkOption = SparkSource | str | None
else:
    # The classes of dagster-pyspark are not loaded to check an option
    _SparkOption = Any

Mode = Literal["drain", "continuous"]

_MAX_SECONDS: Final = 365 * 86_400
_GROUP: Final = re.compile(r"[A-Za-z0-9_]{1,100}")
_RESOURCE_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ASSET_ATTRIBUTES: Final = (
    "automation_condition",
    "code_version",
    "description",
    "freshness_policy",
    "group_name",
    "kinds",
    "metadata",
    "owners",
    "tags",
)
"""What `asset_attributes` can change, with the names of `dagster.AssetSpec`."""
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
    def run_hours(self) -> float | None:
        """How long a worker runs until the leader sensor replaces it; None for no end."""

    @property
    def rolling_replacement(self) -> bool:
        """Whether the leader sensor replaces workers of another version."""

    @property
    def code_version(self) -> str | None:
        """The version of the user's code; None for the commit or image of the code location."""


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
    def output_asset_key(self) -> Any:
        """Asset key of the output; None derives it from the table."""

    @property
    def transform(self) -> Callable[..., Any] | None:
        """The user's function of a Spark DataFrame; None on the Arrow path, without a session."""

    @property
    def spark_config(self) -> Mapping[str, str]:
        """Properties of the Spark session."""

    @property
    def transform_arrow(self) -> Callable[..., Any] | None:
        """The user's function of a pyarrow Table."""

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
        replaces: str | None,
        leads: bool,
        leader_patience_seconds: float,
    ) -> "Worker":
        """Build a worker of this application.

        The leader moves the leases of the worker `replaces` to it. With `leads` it contains a
        standby leader, which takes a lock that is absent for `leader_patience_seconds`.
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


class DagsterOptions(CheckedFields):
    """How a pipeline appears in Dagster: the arguments of `KinesisPipeline.definitions`.

    The attributes of `KinesisPipelineComponent` in `defs.yaml` have the same names.

    Example:
        >>> import dagster as dg
        >>> from kcl_pipeline import DagsterOptions
        >>> options = DagsterOptions(
        ...     owners=["team:shop"],
        ...     asset_attributes={"automation_condition": dg.AutomationCondition.on_cron("@daily")},
        ... )

    Raises:
        SettingsError: An option is wrong. The message says what to write instead.
    """

    model_config = ConfigDict(frozen=True, strict=True, arbitrary_types_allowed=True)
    named: ClassVar[str] = "an option"

    aws: AwsResource | str | None = Field(
        default=None,
        description="Region, endpoint and credentials: an AwsResource, or the key of one among "
        "your resources. None: the standard environment.",
    )
    spark: _SparkOption = Field(
        default=None,
        description="A SparkResource, or a PySparkResource or LazyPySparkResource of "
        "dagster-pyspark, or the key of one among your resources. None: a SparkResource with "
        "spark_config, if the pipeline uses Spark.",
    )
    leader_default_running: bool = Field(
        default=False,
        description="Whether the sensor runs, and starts workers, as soon as Dagster loads the "
        "code. Otherwise a user starts it in the Dagster UI.",
    )
    progress_seconds: float = Field(
        default=60.0,
        ge=0.1,
        le=86_400,
        allow_inf_nan=False,
        description="Time between two reports of the output, at least 9 seconds. Each is one "
        "event, about 9 kB of Dagster's event log.",
    )
    group_name: str | None = Field(
        default=None, description="Group of the assets. None: the pipeline's name."
    )
    owners: Sequence[str] = Field(default=(), description="E-mail addresses or `team:...`.")
    tags: Mapping[str, str] = Field(default_factory=dict, description="Tags of the assets.")
    asset_attributes: Mapping[str, Any] | Callable[[dg.AssetSpec], dg.AssetSpec] | None = Field(
        default=None,
        description="Attributes of the output that replace those of this package, such as "
        "automation_condition, description or kinds; metadata and tags are merged. Or a function "
        "that gets the AssetSpec of each asset and returns the one to use.",
    )
    lag_threshold_seconds: float = Field(
        default=60.0,
        ge=0,
        le=_MAX_SECONDS,
        allow_inf_nan=False,
        description="The lag check fails above this lag.",
    )
    scale_up_lag_seconds: float | None = Field(
        default=120.0,
        ge=0,
        le=_MAX_SECONDS,
        allow_inf_nan=False,
        description="The sensor starts more workers above this lag. None: it keeps `workers.min` "
        "workers.",
    )
    scale_up_cpu_percent: float | None = Field(
        default=None,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="The sensor starts more workers above this mean CPU of the workers. None: 80, "
        "or no limit with Dagster's default launcher, whose runs share one machine. 100: no limit.",
    )
    check_limits: CheckLimits = Field(
        default_factory=CheckLimits,
        description="When the other checks fail. None: the defaults of `CheckLimits`.",
    )

    @field_validator("aws", mode="before")
    @classmethod
    def _check_aws(cls, value: object) -> object:
        if isinstance(value, str) and _RESOURCE_KEY.fullmatch(value):
            return value
        if value is not None and not isinstance(value, AwsResource):
            advice = "Write AwsResource(...), the key of a resource, such as 'aws', or None"
            raise wrong("aws", value, "is not an AwsResource", advice)
        return value

    @field_validator("spark", mode="before")
    @classmethod
    def _check_spark(cls, value: object) -> object:
        if value is not None and not (isinstance(value, str) and _RESOURCE_KEY.fullmatch(value)):
            from kcl_pipeline.orchestration.spark import check_spark  # noqa: PLC0415 (it is slow)

            check_spark(value)
        return value

    @field_validator("group_name", mode="before")
    @classmethod
    def _check_group(cls, value: object) -> object:
        if value is not None and not _GROUP.fullmatch(str(value)):
            advice = "Write 1 to 100 of the characters A-Z a-z 0-9 _, or None"
            raise wrong("group_name", value, "is not a group name", advice)
        return value

    @field_validator("owners", mode="before")
    @classmethod
    def _check_owners(cls, value: Sequence[str]) -> Sequence[str]:
        check_texts("owners", value, "Write owners=['team:data', 'me@example.com']")
        return tuple(value)

    @field_validator("tags", mode="before")
    @classmethod
    def _check_tags(cls, value: Mapping[str, str] | None) -> Mapping[str, str]:
        tags: Mapping[str, str] = {} if value is None else value
        check_options("tags", tags, "{'domain': 'orders'}")
        return dict(tags)

    @field_validator("asset_attributes", mode="before")
    @classmethod
    def _check_attributes(cls, value: object) -> object:
        if isinstance(value, Mapping):
            for name in value:
                if name not in ASSET_ATTRIBUTES:
                    raise SettingsError(
                        f"asset_attributes[{name!r}] is not an attribute of the output that can "
                        f"be set. {suggestion(str(name), ASSET_ATTRIBUTES)}"
                    )
        elif value is not None:
            example = "a dictionary, such as {'kinds': ['delta']}, or a function of an AssetSpec"
            check_function("asset_attributes", value, ["spec"], example)
        return value

    @field_validator("check_limits", mode="before")
    @classmethod
    def _check_limits(cls, value: object) -> object:
        if value is None:
            return CheckLimits()
        if not isinstance(value, CheckLimits):
            advice = "Write CheckLimits(lag_error_seconds=600), or leave it out"
            raise wrong("check_limits", value, "is not a CheckLimits", advice)
        return value
