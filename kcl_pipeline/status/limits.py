"""Define when the checks of a pipeline fail."""

from dataclasses import dataclass
from typing import Final

from kcl_pipeline.arguments import check_number, checked_arguments
from kcl_pipeline.errors import SettingsError

_SECONDS: Final = "a time in seconds"
_MAX_SECONDS: Final = 365 * 86_400.0


@checked_arguments
@dataclass(frozen=True, slots=True)
class CheckLimits:
    """When the checks in the Dagster UI fail. Times are in seconds.

    Example:
        >>> from kcl_pipeline import CheckLimits
        >>> limits = CheckLimits(lag_error_seconds=600, dead_letters_per_hour=10)

    Raises:
        SettingsError: A limit is out of its range.
    """

    retention_warn_seconds: float = 43_200.0
    """`data_within_retention` warns if the oldest unread record leaves the retention period of its
    stream in less than this time. Default: 12 hours. The shortest retention period is 24 hours."""
    retention_error_seconds: float = 10_800.0
    """`data_within_retention` fails with severity ERROR below this time. Default: 3 hours."""
    lag_error_seconds: float = 900.0
    """`lag_below_threshold` fails with severity ERROR above this lag. Default: 15 minutes."""
    checkpoint_age_seconds: float = 900.0
    """`shards_moving` fails if the checkpoint of a shard has not changed for this time while
    its oldest unread record is at least as old. Default: 15 minutes."""
    leader_absent_seconds: float = 60.0
    """`leader_present` fails if nobody has led for this time."""
    dead_letters_per_hour: int = 0
    """`no_new_dead_letters` warns if more records became dead letters in the last hour."""

    def __post_init__(self) -> None:
        for name in (
            "retention_warn_seconds",
            "retention_error_seconds",
            "lag_error_seconds",
            "checkpoint_age_seconds",
            "leader_absent_seconds",
        ):
            check_number(name, getattr(self, name), _SECONDS, most=_MAX_SECONDS)
        letters = self.dead_letters_per_hour
        name, unit = "dead_letters_per_hour", "a number of records"
        check_number(name, letters, unit, least=0, most=10**12, whole=True)
        if self.retention_error_seconds > self.retention_warn_seconds:
            raise SettingsError(
                f"retention_error_seconds={self.retention_error_seconds:g} is more than "
                f"retention_warn_seconds={self.retention_warn_seconds:g}. Write "
                f"{self.retention_warn_seconds:g} or less."
            )
