"""What a check of `kcl-pipeline doctor` found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is. Only a problem makes the exit code 1; `unknown` was not tried, because
    something before it failed or is not there yet.
    """

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """`subject` is what was looked at, `text` what was seen, `advice` what to do about it (empty
    when there is nothing to do).
    """

    level: Level
    subject: str
    text: str
    advice: str = ""


def ok(subject: str, text: str) -> Finding:
    """All is well."""
    return Finding(Level.OK, subject, text)


def warning(subject: str, text: str, advice: str) -> Finding:
    """May be intended."""
    return Finding(Level.WARNING, subject, text, advice)


def problem(subject: str, text: str, advice: str) -> Finding:
    """Records will not flow, or not as they should, until this is done."""
    return Finding(Level.PROBLEM, subject, text, advice)


def unknown(subject: str, text: str) -> Finding:
    """Could not be tried."""
    return Finding(Level.UNKNOWN, subject, text)
