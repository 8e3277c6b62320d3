"""What the code cites exists: sections of the protocol, and targets of links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("kcl_pipeline", "verification", "tests", "benchmarks", "docs")
SECTION = re.compile(r"protocol\s+§\s*(\d+(?:\.\d+)*)")
LISTED = re.compile(r"protocol\s+§\s*\d+(?:\.\d+)*((?:,\s+§\s*\d+(?:\.\d+)*)+)")
HEADING = re.compile(r"^#+ (\d+(?:\.\d+)*)[. ]", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)(#[^)\s]+)?\)")


def texts() -> dict[Path, str]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    files += list(ROOT.glob("*.md"))
    return {
        path: path.read_text(encoding="utf-8")
        for path in files
        if path.suffix in {".py", ".md", ".toml"} and path.is_file() and path != Path(__file__)
    }


def test_every_cited_section_of_the_protocol_exists() -> None:
    headings = set(HEADING.findall((ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")))
    assert len(headings) > 40
    missing = []
    for path, text in texts().items():
        cited = set(SECTION.findall(text))
        for more in LISTED.findall(text):
            cited |= set(re.findall(r"\d+(?:\.\d+)*", more))
        missing += [f"{path.relative_to(ROOT)}: §{one}" for one in sorted(cited - headings)]
    assert missing == []


def test_nothing_cites_a_document_that_is_not_in_the_repository() -> None:
    found = [str(p.relative_to(ROOT)) for p, text in texts().items() if re.search("design §", text)]
    assert found == []


@pytest.mark.parametrize(
    "page",
    sorted(str(p.relative_to(ROOT)) for p in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")]),
)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    missing = [
        target
        for target, _ in LINK.findall(path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists()
    ]
    assert missing == []
