"""The base of all settings: strict types, limits, and no unknown names."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

MAX_NUMBER: Final = 2**31 - 1
"""Largest value of a setting, as KCL stores settings in Java's `int`. 24 days in milliseconds."""

MAX_BYTES: Final = 2**40
"""Largest size in bytes (our own limit)."""

STREAM_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
"""Kinesis: the pattern of StreamName."""

STREAM_ARN: Final = re.compile(
    r"arn:aws[a-z0-9-]*:kinesis:[a-z0-9-]{1,64}:[0-9]{1,32}:stream/[A-Za-z0-9_.-]{1,128}"
)
STREAM_FORMS: Final = (
    "the name of a stream (1 to 128 of A-Z a-z 0-9 _ . -) or "
    "arn:aws:kinesis:<region>:<account>:stream/<name>"
)

STREAM_CONSUMER: Final = re.compile(
    f"({STREAM_ARN.pattern})/consumer/[A-Za-z0-9_.-]{{1,128}}(:[0-9]{{1,32}})?"
)
CONSUMER_FORM: Final = "arn:aws:kinesis:<region>:<account>:stream/<name>/consumer/<name>:<epoch>"


class StrictSettings(BaseModel):
    """Settings whose values are not converted and have limits.

    For example, the string "1" and True are not accepted as numbers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @field_validator("*")
    @classmethod
    def _is_within_limits(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool) and value != math.inf:
            most = most_of(info.field_name or "")
            if value > most:
                raise PydanticCustomError("less_than_equal", "above the limit {le}", {"le": most})
        return value


def most_of(name: str) -> int:
    """Return the largest value of a setting of this name. Its field may have a smaller limit."""
    return MAX_BYTES if "bytes" in name else MAX_NUMBER


def is_stream(text: str) -> bool:
    """Return whether this is the name or the ARN of a stream."""
    return bool(STREAM_NAME.fullmatch(text) or STREAM_ARN.fullmatch(text))


def stream_of_consumer(arn: str) -> str | None:
    """Return the ARN of the stream of a fan-out consumer. None: this is not such an ARN."""
    found = STREAM_CONSUMER.fullmatch(arn)
    return found[1] if found else None


def names_stream(name_or_arn: str, arn: str) -> bool:
    """Return whether a name or ARN can belong to the stream with this ARN."""
    return name_or_arn in (arn, arn.rpartition("/")[2])
