"""The page of checks and events has one section for each of them, and no other one."""

from __future__ import annotations

import re
from pathlib import Path

import dagster as dg
import pytest

from kcl_pipeline import events
from kcl_pipeline.events import Event, Measurement
from kcl_pipeline.orchestration.definitions import build_definitions
from tests.support.dagster_fakes import FakePipeline

PAGE = Path(__file__).parents[2] / "docs" / "checks-and-events.md"
TEXT = PAGE.read_text(encoding="utf-8")
SECTION = re.compile(r"^### `(\w+)`\n\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
PARTS = ("Meaning", "Look at", "Do")


def checks() -> set[str]:
    definitions = build_definitions(FakePipeline())
    return {
        key.name
        for check in definitions.asset_checks or ()
        if isinstance(check, dg.AssetChecksDefinition)
        for key in check.check_keys
    }


def event_classes() -> set[str]:
    return {
        one.__name__
        for one in vars(events).values()
        if isinstance(one, type) and issubclass(one, Event) and one not in (Event, Measurement)
    }


def sections(chapter: str) -> dict[str, str]:
    begin = TEXT.index(f"\n## {chapter}\n")
    end = TEXT.find("\n## ", begin + 1)
    return dict(SECTION.findall(TEXT[begin : end if end > 0 else len(TEXT)]))


def test_every_check_has_a_row_and_every_finding_names_one():
    rows, findings = TEXT.split("\n## Each finding\n")
    assert set(re.findall(r"^\| `(\w+)` \| (?:output|fleet) \|", rows, re.MULTILINE)) == checks()
    named = re.findall(r"^\| `\w+` \| `(\w+)` \|", findings, re.MULTILINE)
    assert set(named) <= checks()
    assert len(named) > 15
    assert len(checks()) == 8


def test_every_event_has_a_section():
    assert set(sections("Each event")) == event_classes()
    assert len(event_classes()) > 30


@pytest.mark.parametrize(("name", "text"), [*SECTION.findall(TEXT)])
def test_a_section_says_what_it_means_what_to_look_at_and_what_to_do(name, text):
    assert re.findall(r"^- \*\*([\w ]+)\.\*\* \S", text, re.MULTILINE) == list(PARTS)
