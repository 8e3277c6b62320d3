"""The result of one check of `kcl-pipeline doctor`."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """Severity of a finding.

    Only `problem` sets the exit code 1. `unknown` means that the check was skipped, because an
    earlier check failed or something does not exist yet.
    """

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        level: Severity.
        subject: What was checked.
        text: What the check found.
        advice: What to do; empty if nothing needs to be done.
    """

    level: Severity
    subject: str
    text: str
    advice: str = ""


def ok(subject: str, text: str) -> Finding:
    """The check passed."""
    return Finding(Severity.OK, subject, text)


def warning(subject: str, text: str, advice: str) -> Finding:
    """The state may be intended."""
    return Finding(Severity.WARNING, subject, text, advice)


def problem(subject: str, text: str, advice: str) -> Finding:
    """Records are not processed correctly until the advice is followed."""
    return Finding(Severity.PROBLEM, subject, text, advice)


def unknown(subject: str, text: str) -> Finding:
    """The check was skipped."""
    return Finding(Severity.UNKNOWN, subject, text)
