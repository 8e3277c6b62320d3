"""Write the result of a run into docs/interop.md, between two markers."""

from __future__ import annotations

import json
import string
import threading
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path

from kcl_pipeline.version import __version__

from .catalogue import CASES
from .plans import PLANS
from .result import Result

BEGIN, END = "<!-- result: begin -->", "<!-- result: end -->"


_LOCK = threading.Lock()


def read_results(file: Path) -> list[Result]:
    """Return the stored results; none if there is no file."""
    return [Result(**one) for one in json.loads(file.read_text())] if file.exists() else []


def keep_result(file: Path, result: Result) -> None:
    """Store a result in place of an earlier one of the same case."""
    with _LOCK:
        key = (result.plan, result.case)
        kept = [one for one in read_results(file) if (one.plan, one.case) != key]
        file.write_text(json.dumps([asdict(one) for one in [*kept, result]], indent=1))


def cell(result: Result | None) -> str:
    """Return the text of one cell."""
    if result is None:
        return "–"
    if not result.passed:
        return "failed"
    return "ok" if result.measured is None else f"{max(result.measured, 1):.0f} s"


def table(results: Sequence[Result], day: date) -> str:
    """Return the section of the page: versions, date, one row per case, and the count."""
    found = {(one.plan, one.case): one for one in results}
    plans = [plan for plan in PLANS if any(one.plan == plan.name for one in results)]
    versions = {one.plan: one.java for one in results}
    letters = string.ascii_uppercase[: len(plans)]
    lines = [
        f"Run of {day.isoformat()}, with kcl_pipeline {__version__}.",
        "",
        "| | application | Java KCL |",
        "|---|---|---|",
        *(
            f"| {letter} | {plan.title} | {versions[plan.name]} |"
            for letter, plan in zip(letters, plans, strict=True)
        ),
        "",
        f"| case | {' | '.join(letters)} |",
        f"|---|{'---|' * len(letters)}",
    ]
    for case in CASES:
        cells = [cell(found.get((plan.name, case.name))) for plan in plans]
        if any(one != "–" for one in cells):
            lines.append(f"| {case.title} | {' | '.join(cells)} |")
    last = [[one for one in results if one.plan == plan.name] for plan in plans]
    sent, again = (
        sum(max(getattr(one, name) for one in found) for found in last)
        for name in ("sent", "again")
    )
    counts = f"{sent:,} records were sent; {again:,} deliveries were repetitions."
    return "\n".join([*lines, "", counts])


def write(page: Path, section: str) -> None:
    """Replace what is between the markers of a page.

    Raises:
        ValueError: A marker is missing.
    """
    text = page.read_text()
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    page.write_text(f"{text[:before]}\n{section}\n{text[after:]}")
