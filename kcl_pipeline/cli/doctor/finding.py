"""The results of the checks of `kcl-pipeline doctor`: findings about the set-up."""

from kcl_pipeline.status.findings import Finding, FindingLevel


def ok(subject: str, text: str) -> Finding:
    """The check passed."""
    return Finding(None, subject, FindingLevel.OK, text)


def warning(subject: str, text: str, advice: str) -> Finding:
    """The state may be intended."""
    return Finding(None, subject, FindingLevel.WARNING, text, advice)


def problem(subject: str, text: str, advice: str) -> Finding:
    """Records are not processed correctly until the advice is followed."""
    return Finding(None, subject, FindingLevel.PROBLEM, text, advice)


def unknown(subject: str, text: str) -> Finding:
    """The check was skipped."""
    return Finding(None, subject, FindingLevel.UNKNOWN, text)
