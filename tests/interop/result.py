"""The result of one case."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """How one case ended.

    Attributes:
        plan: Name of the plan.
        case: Name of the case.
        java: Version of the Java KCL.
        passed: Whether all that must hold held.
        remark: What was seen, or what went wrong.
        measured: The time of the table in seconds, see `Found`.
        seconds: Duration of the case.
        sent: Records sent to the application so far.
        again: Deliveries beyond the first so far.
    """

    plan: str
    case: str
    java: str
    passed: bool
    remark: str
    measured: float | None
    seconds: float
    sent: int
    again: int
