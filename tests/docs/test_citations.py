"""What is cited exists: sections of the protocol, pages, and anchors of their headings."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from myst_parser.slugs import github_slugify, unique_slug

ROOT = Path(__file__).parents[2]
FOLDERS = ("kcl_pipeline", "verification", "tests", "benchmarks", "docs")
SECTION = re.compile(r"protocol\s+§\s*(\d+(?:\.\d+)*)")
LISTED = re.compile(r"protocol\s+§\s*\d+(?:\.\d+)*((?:,\s+§\s*\d+(?:\.\d+)*)+)")
HEADING = re.compile(r"^#+ (\d+(?:\.\d+)*)[. ]", re.MULTILINE)
PARSER = MarkdownIt("commonmark").enable("table")
ANCHORED_LEVELS = 4
"""As `myst_heading_anchors` in docs/conf.py."""


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


def tokens(path: Path) -> Iterator[tuple[Token, Token]]:
    """The inline parts of a page, each with the token that opens its block."""
    blocks = PARSER.parse(path.read_text(encoding="utf-8"))
    return ((before, part) for before, part in pairwise(blocks) if part.type == "inline")


@functools.cache
def anchors(path: Path) -> set[str]:
    """The anchors of the headings of a page, as the site and GitHub make them."""
    found: set[str] = set()
    for before, part in tokens(path):
        if before.type == "heading_open" and int(before.tag[1:]) <= ANCHORED_LEVELS:
            texts = [each.content for each in part.children or () if each.content]
            found.add(unique_slug(github_slugify("".join(texts)), found))
    return found


def links(path: Path) -> Iterator[str]:
    """The targets of the links and pictures of a page, without those of other sites."""
    for _, part in tokens(path):
        for each in part.children or ():
            target = str(each.attrGet("href") or each.attrGet("src") or "")
            if target and not target.startswith(("http:", "https:", "mailto:")):
                yield target


def leads_somewhere(target: str, path: Path) -> bool:
    name, _, anchor = target.partition("#")
    page = (path.parent / name).resolve() if name else path
    return page.exists() and (not anchor or anchor in anchors(page))


PAGES = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), ROOT / "tests" / "README.md"]


@pytest.mark.parametrize("page", sorted(str(path.relative_to(ROOT)) for path in PAGES))
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    assert [target for target in links(path) if not leads_somewhere(target, path)] == []
